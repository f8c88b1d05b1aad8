// The encodings of AMX-TILE and AMX-BF16 in 64-bit mode. They are C4, two VEX bytes, opcode, ModRM, and for
// memory operands SIB and a displacement. Assemblers put no prefix before them; this decoder does not take an
// instruction with one for AMX.
#include "instruction.h"

namespace amx_emulator {

namespace {

constexpr int kTiles = 8;

enum Prefix { kNone = 0, k66 = 1, kF3 = 2, kF2 = 3 };  // VEX.pp

struct Fields {
  int prefix, mod, reg, rm, vvvv;
  bool memory() const { return mod != 3; }
};

int32_t read_displacement(const uint8_t* code, int bytes) {
  if (bytes == 0) return 0;
  if (bytes == 1) return static_cast<int8_t>(code[0]);
  uint32_t value = 0;
  for (int n = 0; n < 4; ++n) value |= static_cast<uint32_t>(code[n]) << (8 * n);
  return static_cast<int32_t>(value);
}

// `code` points to ModRM; returns how many bytes ModRM, SIB and displacement take.
int decode_memory(const uint8_t* code, bool vex_x, bool vex_b, MemoryOperand& memory, bool& sib) {
  const int mod = code[0] >> 6;
  const int rm = code[0] & 7;
  int length = 1;
  int displacement_bytes = mod == 1 ? 1 : mod == 2 ? 4 : 0;
  sib = rm == 4;
  if (sib) {
    const uint8_t byte = code[length++];
    const int index = ((byte >> 3) & 7) | (vex_x ? 8 : 0);
    memory.shift = byte >> 6;
    memory.index = index == 4 ? kNoRegister : index;   // rsp's number; r12 is an index like any other
    const bool no_base = (byte & 7) == 5 && mod == 0;  // whatever VEX.B says
    memory.base = no_base ? kNoRegister : (byte & 7) | (vex_b ? 8 : 0);
    if (no_base) displacement_bytes = 4;
  } else if (rm == 5 && mod == 0) {
    memory.base = kNextInstruction;
    displacement_bytes = 4;
  } else {
    memory.base = rm | (vex_b ? 8 : 0);
  }
  memory.displacement = read_displacement(code + length, displacement_bytes);
  return length + displacement_bytes;
}

// Opcode 49: the configuration, and TILEZERO.
const char* decode_configuration(const Fields& f, Instruction& instruction) {
  if (f.memory()) {
    if (f.prefix != kNone && f.prefix != k66) return "no such instruction (opcode 49, memory operand)";
    if (f.reg != 0) return "LDTILECFG and STTILECFG need ModRM.reg 0";
    instruction.kind = f.prefix == kNone ? Kind::kLoadConfig : Kind::kStoreConfig;
    return nullptr;
  }
  if (f.prefix == kNone && f.reg == 0 && f.rm == 0) {
    instruction.kind = Kind::kRelease;
    return nullptr;
  }
  if (f.prefix != kF2 || f.rm != 0) return "no such instruction (opcode 49, register operand)";
  instruction.kind = Kind::kZero;
  instruction.tile = f.reg;
  return nullptr;
}

// Opcode 4B: loads and stores of tiles.
const char* decode_transfer(const Fields& f, bool sib, Instruction& instruction) {
  if (!f.memory() || f.prefix == kNone) return "no such instruction (opcode 4B)";
  if (!sib) return "tile loads and stores need a SIB byte";
  instruction.kind = f.prefix == kF2 ? Kind::kLoad : f.prefix == k66 ? Kind::kLoadT1 : Kind::kStore;
  instruction.tile = f.reg;
  return nullptr;
}

// Opcode 5C: products of 16-bit floats.
const char* decode_product(const Fields& f, Instruction& instruction) {
  if (f.memory() || f.prefix != kF3) return "TDPBF16PS is the only product of tiles that is emulated";
  instruction.kind = Kind::kDotBf16;
  instruction.tile = f.reg;
  instruction.source1 = f.rm;
  instruction.source2 = f.vvvv;
  if (f.rm >= kTiles || f.vvvv >= kTiles) return "there are eight tiles";
  return nullptr;
}

}  // namespace

const char* mnemonic(Kind kind) {
  switch (kind) {
    case Kind::kLoadConfig:
      return "ldtilecfg";
    case Kind::kStoreConfig:
      return "sttilecfg";
    case Kind::kRelease:
      return "tilerelease";
    case Kind::kZero:
      return "tilezero";
    case Kind::kLoad:
      return "tileloadd";
    case Kind::kLoadT1:
      return "tileloaddt1";
    case Kind::kStore:
      return "tilestored";
    case Kind::kDotBf16:
      return "tdpbf16ps";
  }
  return "";
}

Decoding decode(const uint8_t* code, Instruction& instruction, const char*& fault) {
  constexpr int kMap0F38 = 2;
  if (code[0] != 0xc4 || (code[1] & 0x1f) != kMap0F38) return Decoding::kNotAmx;
  const int opcode = code[3];
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c && opcode != 0x5e) return Decoding::kNotAmx;

  // R, X, B and vvvv are stored inverted.
  const bool vex_r = (code[1] & 0x80) == 0, vex_x = (code[1] & 0x40) == 0, vex_b = (code[1] & 0x20) == 0;
  const bool wide = (code[2] & 0x80) != 0, long_vector = (code[2] & 0x04) != 0;
  const uint8_t modrm = code[4];
  Fields f{};
  f.prefix = code[2] & 3;
  f.vvvv = (~code[2] >> 3) & 15;
  f.mod = modrm >> 6;
  f.reg = ((modrm >> 3) & 7) | (vex_r ? 8 : 0);
  f.rm = (modrm & 7) | (vex_b ? 8 : 0);

  instruction = Instruction{};
  bool sib = false;
  instruction.length = 4 + (f.memory() ? decode_memory(code + 4, vex_x, vex_b, instruction.memory, sib) : 1);
  if (opcode == 0x49) {
    fault = decode_configuration(f, instruction);
  } else if (opcode == 0x4b) {
    fault = decode_transfer(f, sib, instruction);
  } else {
    fault = opcode == 0x5c ? decode_product(f, instruction) : "AMX-INT8 is not emulated";
  }
  if (fault == nullptr && wide) fault = "VEX.W must be 0";
  if (fault == nullptr && long_vector) fault = "VEX.L must be 0";
  if (fault == nullptr && f.reg >= kTiles) fault = "there are eight tiles";
  if (fault == nullptr && instruction.kind != Kind::kDotBf16 && f.vvvv != 0) fault = "VEX.vvvv must be 1111";
  return fault == nullptr ? Decoding::kDecoded : Decoding::kUndefined;
}

}  // namespace amx_emulator
