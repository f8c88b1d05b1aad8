// The texts of reports, which say which threads were where.
#include <stdexcept>

#include "decode/text.h"
#include "execute/warp.h"

namespace ptx_machine {

namespace {

std::string triple(const u32 (&of)[3]) {
  return "(" + std::to_string(of[0]) + ", " + std::to_string(of[1]) + ", " + std::to_string(of[2]) + ")";
}

}  // namespace

std::string place_text(const Kernel& kernel, const Instruction& instruction) {
  const Module& module = *kernel.module;
  std::string text = "PTX line " + std::to_string(instruction.line) + ": " + module.line(instruction.line);
  const std::string source = module.source_of(instruction);
  return source.empty() ? text : text + "\n  of " + source;
}

std::string lanes_text(u32 lanes) {
  std::string text;
  for (int l = 0; l < kLanes; ++l) {
    if (!on(lanes, l)) continue;
    int last = l;
    while (last + 1 < kLanes && on(lanes, last + 1)) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(l) + (last > l ? "-" + std::to_string(last) : "");
    l = last;
  }
  return text;
}

void fail(const Warp& warp, const Instruction& instruction, u32 lanes, const std::string& what) {
  const Block& block = *warp.block;
  throw std::runtime_error("ptx machine: " + what + "\n  in " + demangled(block.kernel->name) + "\n  block " +
                           triple(block.id) + " of " + triple(block.launch->grid) + ", warp " +
                           std::to_string(warp.index) + ", lanes " + lanes_text(lanes) + "\n  " +
                           place_text(*block.kernel, instruction));
}

}  // namespace ptx_machine
