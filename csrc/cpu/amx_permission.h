// Asks whether this process may execute AMX-BF16 instructions.
#pragma once

namespace selfattn::cpu {

// Linux gives the large tile registers only to processes that ask for them. The first call asks, for all
// threads; any thread may call, any number of times. An emulator counts as permission, see
// amx_permission.cpp.
bool amx_permitted();

// Returns nullptr if AMX-BF16 can be used here and now, otherwise a sentence for people that says why not. It
// asks for the permission only if the processor has the instructions.
const char* amx_unavailable_reason();

}  // namespace selfattn::cpu
