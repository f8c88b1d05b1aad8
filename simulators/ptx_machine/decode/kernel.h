// Kernels as the machine executes them, and the modules that contain them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/classes.h"
#include "memory.h"
#include "types.h"

namespace ptx_machine {

struct Warp;
struct Instruction;

// Does the work of an instruction, for the lanes in `mask`.
using Handler = void (*)(Warp&, const Instruction&, u32 mask);

enum class Kind : u8 {
  kPlain,
  kBranch,
  kBranchTable,
  kExit,
  kBarrier,    // bar.sync, bar.red, bar.arrive: threads of the block
  kWholeWarp,  // mma, ldmatrix: all 32 lanes, .aligned
  kSomeLanes,  // .sync with a mask of members
  kTest,       // mbarrier.try_wait: lanes that must wait give way to others
};

constexpr u32 kNoOperand = 0x7fffffffu;
// This bit marks an operand as an offset into the constants, not into the registers, and a predicate as
// negated.
constexpr u32 kMarked = 0x80000000u;
constexpr int kMostOperands = 16;
// Instructions of the kind kSomeLanes have their mask of members in this operand.
constexpr int kMembers = 5;

// A line of a source file, which has a number in Module::files.
struct SourceLine {
  u32 file = 0, line = 0;  // 0 if there is none
};

struct Instruction {
  Handler handler = nullptr;
  Kind kind = Kind::kPlain;
  InstructionClass instruction_class = InstructionClass::kBranch;  // until choose() sets it
  bool guard_negated = false;
  bool wide = false;            // whether the address has 64 bits
  u32 guard = kNoOperand;       // the number of a predicate
  u8 variant = 0;               // has a meaning for the handler only
  u8 count = 0;                 // also for the handler only
  u32 operands[kMostOperands];  // offsets of registers in bytes, or numbers of predicates
  s64 immediate = 0;
  u32 target = 0;  // where a branch leads, or the number of a table
  u32 line = 0;    // line of the PTX
  SourceLine source, inlined_at;
  // The registers of Kernel::product_registers that the instruction names: a part of Kernel::touched.
  // Products have none here.
  u32 touched = 0, touched_count = 0;
  u32 repeats = 1;  // how many instructions of its class it counts as

  // The memory that this instruction accessed last.
  mutable Range found;
  mutable u32 found_version = 0;
  mutable u64 executed = 0;
  // Counts of shared memory; least_wavefronts are those that one access of all lanes together needs.
  mutable u64 accesses = 0, wavefronts = 0, least_wavefronts = 0;

  Instruction() {
    for (u32& operand : operands) operand = kNoOperand;
  }
};

// A special register that a kernel reads: which one (special_registers.h), and the register that holds it.
struct SpecialRegister {
  u8 which;
  u32 offset;
};

// The operands and options of a wgmma.mma_async.
struct Product {
  std::vector<u32> results;  // four registers for every eight columns
  u32 left[4] = {};          // registers of the left matrix, or the descriptor
  u32 left_matrix = kNoOperand, right_matrix = kNoOperand;
  u32 adds = kNoOperand;  // the number of a predicate
  u32 columns = 0;
  bool left_in_registers = false, left_turned = false, right_turned = false, bfloat16 = false;
  std::vector<u32> registers;  // results and left, as numbers of Kernel::product_registers
};

struct Module;

struct Kernel {
  std::string name;
  Module* module = nullptr;
  std::vector<Instruction> code;
  std::vector<std::vector<u32>> tables;  // tables of brx.idx
  std::vector<u8> constants;             // each constant, once for every lane
  std::vector<SpecialRegister> specials;
  struct Parameter {
    u32 offset, bytes;
  };
  std::vector<Parameter> parameters;
  u32 parameter_bytes = 0;
  u32 register_bytes = 0;  // for a warp
  u32 predicates = 0;
  u32 static_shared = 0;
  u32 local_bytes = 0;  // for a thread
  std::vector<Product> products;
  u32 product_registers = 0;  // how many registers are results or operands of products
  std::vector<u32> touched;
  u32 most_threads = 1024;
  u32 registers_of_thread = 0;          // 0 if not known
  u32 most_dynamic_shared = 48 * 1024;  // what cudaFuncSetAttribute allows
  u64 launches = 0;
};

// The text of one translation unit.
struct Module {
  std::string text;
  std::vector<size_t> line_starts;
  std::map<u32, std::string> files;
  struct Function {
    size_t begin = 0, end = 0;  // positions in the text
    bool is_kernel = false;
  };
  std::unordered_map<std::string, Function> functions;
  // A variable: a shared one gets an address in each kernel that names it, any other has a single address.
  struct Variable {
    Space space;
    u64 address;
    u32 bytes, align;
    bool open;  // whether it is dynamic shared memory
  };
  std::unordered_map<std::string, Variable> variables;
  std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels;

  // Returns "file:12", or "file:12 in file:34" for inlined code; empty if the source is not known.
  std::string source_of(const Instruction& instruction) const;
  std::string line(u32 number) const;
  u32 line_at(size_t position) const;
};

// Finds functions and variables; functions are decoded when they are first needed.
std::unique_ptr<Module> read_module(std::string text);
// Returns null if the module has no such kernel. Throws std::runtime_error for PTX that it cannot read.
Kernel* decode_kernel(Module& module, const std::string& name);

}  // namespace ptx_machine
