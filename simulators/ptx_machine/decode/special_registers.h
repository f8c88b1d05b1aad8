// Special registers, numbered by this list; execute/block.cpp gives each its value.
#pragma once

namespace ptx_machine {

const char* const kSpecialRegisters[] = {
    "%tid.x",       "%tid.y",       "%tid.z",       "%ntid.x",      "%ntid.y",
    "%ntid.z",      "%ctaid.x",     "%ctaid.y",     "%ctaid.z",     "%nctaid.x",
    "%nctaid.y",    "%nctaid.z",    "%laneid",      "%warpid",      "%nwarpid",
    "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt",
    "%smid",        "%nsmid",       "%gridid",      "%clock",       "%dynamic_smem_size",
    "%envreg0"};
constexpr int kSpecialRegisterCount = sizeof(kSpecialRegisters) / sizeof(kSpecialRegisters[0]);

}  // namespace ptx_machine
