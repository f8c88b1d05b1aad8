#include "decode/classes.h"

#include <set>
#include <unordered_map>

#include "decode/statement.h"

namespace ptx_machine {

namespace {

using Class = InstructionClass;

const char* const kNames[kInstructionClasses] = {
    "other",       "mma_bfloat16", "mma_float16", "float32",      "float32_choice", "float64",   "float16",
    "integer",     "comparison",   "conversion",  "special",      "move",           "parameter", "ldmatrix",
    "shared_load", "shared_store", "global_load", "global_store", "local",          "atomic",    "copy",
    "copy_wait",   "shuffle",      "vote",        "barrier",      "warp_barrier",   "branch",
};

// Classes of instructions for which the opcode is enough.
const std::unordered_map<std::string, Class> kOfOpcode = {
    {"cvt", Class::kConversion},      {"mov", Class::kMove},        {"cvta", Class::kMove},
    {"ldmatrix", Class::kLoadMatrix}, {"setp", Class::kComparison}, {"selp", Class::kComparison},
    {"testp", Class::kComparison},    {"atom", Class::kAtomic},     {"red", Class::kAtomic},
    {"shfl", Class::kShuffle},        {"vote", Class::kVote},       {"redux", Class::kVote},
    {"activemask", Class::kVote},     {"elect", Class::kVote},      {"ex2", Class::kSpecial},
    {"lg2", Class::kSpecial},         {"rcp", Class::kSpecial},     {"rsqrt", Class::kSpecial},
    {"sqrt", Class::kSpecial},        {"tanh", Class::kSpecial},
};

const std::set<std::string> kNoArithmetic = {
    "membar", "fence", "setmaxnreg", "prefetch", "prefetchu", "nanosleep", "griddepcontrol", "trap", "brkpt"};

// Returns whether one of the types of a cvt is a float: "f32", "bf16x2", "e4m3x2".
bool is_of_floats(const Statement& statement) {
  const std::string &to = statement.words.at(statement.words.size() - 2), &from = statement.type();
  const auto is_integer = [](const std::string& type) { return type[0] == 'u' || type[0] == 's'; };
  return !is_integer(to) || !is_integer(from);
}

Class class_of_memory(const Statement& statement) {
  const bool loads = statement.name() != "st";
  switch (static_cast<Space>(statement.instruction.variant)) {
    case Space::kShared:
      return loads ? Class::kSharedLoad : Class::kSharedStore;
    case Space::kLocal:
      return Class::kLocal;
    case Space::kParameters:
      return Class::kParameter;
    default:
      return loads ? Class::kGlobalLoad : Class::kGlobalStore;
  }
}

Class class_of_arithmetic(const Statement& statement) {
  static const std::set<std::string> kChoices = {"min", "max", "neg", "abs", "copysign"};
  const std::string& type = statement.type();
  if (type == "pred") return Class::kComparison;
  if (type == "f32" && statement.name() == "div") return Class::kSpecial;
  if (type == "f32") return kChoices.count(statement.name()) != 0 ? Class::kFloat32Choice : Class::kFloat32;
  if (type == "f64") return Class::kFloat64;
  const bool is_small = type == "f16" || type == "bf16" || type == "f16x2" || type == "bf16x2";
  return is_small ? Class::kFloat16 : Class::kInteger;
}

}  // namespace

const char* class_name(InstructionClass of) { return kNames[static_cast<int>(of)]; }

InstructionClass class_of(const Statement& statement) {
  const std::string& name = statement.name();
  if (name == "cvt" && !is_of_floats(statement)) return Class::kInteger;
  const auto found = kOfOpcode.find(name);
  if (found != kOfOpcode.end()) {
    return found->second == Class::kSpecial && statement.type() == "f64" ? Class::kFloat64 : found->second;
  }
  if (name == "wgmma" && !statement.has("mma_async")) return Class::kOther;
  if (name == "mma" || name == "wgmma")
    return statement.has("bf16") ? Class::kMmaBfloat16 : Class::kMmaFloat16;
  if (name == "ld" || name == "ldu" || name == "st") return class_of_memory(statement);
  if (name == "cp") {
    const bool waits =
        statement.has("commit_group") || statement.has("wait_group") || statement.has("wait_all");
    return waits ? Class::kCopyWait : Class::kCopy;
  }
  if (name == "mbarrier") return Class::kCopyWait;
  if (name == "bar" || name == "barrier")
    return statement.has("warp") ? Class::kWarpBarrier : Class::kBarrier;
  return kNoArithmetic.count(name) != 0 ? Class::kOther : class_of_arithmetic(statement);
}

}  // namespace ptx_machine
