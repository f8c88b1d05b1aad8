// AMX instructions as data: what the bytes at an address say.
#pragma once

#include <cstdint>

namespace amx_emulator {

enum class Kind {
  kLoadConfig,
  kStoreConfig,
  kRelease,
  kZero,
  kLoad,
  kLoadT1,
  kStore,
  kDotBf16,
};
constexpr int kKinds = 8;
const char* mnemonic(Kind kind);

// Registers by the number of their encoding: 0 rax, 1 rcx, 2 rdx, 3 rbx, 4 rsp, 5 rbp, 6 rsi, 7 rdi, 8..15.
constexpr int kNoRegister = -1;
constexpr int kNextInstruction = -2;  // the base of a rip-relative address

struct MemoryOperand {
  int base = kNoRegister;
  int index = kNoRegister;
  int shift = 0;  // the index counts 1 << shift times
  int32_t displacement = 0;
};

struct Instruction {
  Kind kind = Kind::kRelease;
  int length = 0;        // bytes
  int tile = 0;          // the tile written, or stored
  int source1 = 0;       // TDPBF16PS: the rows
  int source2 = 0;       // TDPBF16PS: the columns, in pairs
  MemoryOperand memory;  // where the kind has one
};

enum class Decoding {
  kNotAmx,     // some other instruction
  kUndefined,  // in AMX's part of the encoding, but #UD on a processor, or a kind that is not emulated
  kDecoded,
};

// Reads no byte beyond the instruction. If it returns kUndefined, `fault` says what is wrong.
Decoding decode(const uint8_t* code, Instruction& instruction, const char*& fault);

}  // namespace amx_emulator
