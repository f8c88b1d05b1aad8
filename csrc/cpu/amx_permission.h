// Whether this process may execute AMX-BF16 instructions.
#pragma once

namespace selfattn::cpu {

// Linux gives the large tile registers only to processes that ask. Asked at the first call, for all threads;
// any thread may call, any number of times. An emulator counts as permission, see amx_permission.cpp.
bool amx_permitted();

// nullptr when AMX-BF16 can be used here and now, otherwise why not, in a sentence for people. It asks for
// the permission only where the processor has the instructions.
const char* amx_unavailable_reason();

}  // namespace selfattn::cpu
