// The table of opcodes.
#include "execute/warp.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

const std::unordered_map<std::string, bool (*)(Statement&)> kChoosers = {
    {"mov", choose_move},
    {"cvta", choose_move},
    {"add", choose_arithmetic},
    {"sub", choose_arithmetic},
    {"mul", choose_arithmetic},
    {"mad", choose_arithmetic},
    {"fma", choose_arithmetic},
    {"div", choose_arithmetic},
    {"rem", choose_arithmetic},
    {"min", choose_arithmetic},
    {"max", choose_arithmetic},
    {"copysign", choose_arithmetic},
    {"neg", choose_sign},
    {"abs", choose_sign},
    {"ex2", choose_function},
    {"lg2", choose_function},
    {"rcp", choose_function},
    {"rsqrt", choose_function},
    {"sqrt", choose_function},
    {"tanh", choose_function},
    {"shl", choose_shift},
    {"shr", choose_shift},
    {"popc", choose_bits},
    {"clz", choose_bits},
    {"brev", choose_bits},
    {"bfind", choose_bits},
    {"prmt", choose_bits},
    {"bfe", choose_bits},
    {"bfi", choose_bits},
    {"lop3", choose_bits},
    {"shf", choose_bits},
    {"and", choose_logic},
    {"or", choose_logic},
    {"xor", choose_logic},
    {"not", choose_logic},
    {"setp", choose_comparison},
    {"selp", choose_comparison},
    {"testp", choose_comparison},
    {"cvt", choose_conversion},
    {"ld", choose_load},
    {"ldu", choose_load},
    {"st", choose_load},
    {"atom", choose_atomic},
    {"red", choose_atomic},
    {"cp", choose_copy},
    {"bar", choose_barrier},
    {"barrier", choose_barrier},
    {"shfl", choose_collective},
    {"vote", choose_collective},
    {"redux", choose_collective},
    {"activemask", choose_collective},
    {"ldmatrix", choose_matrix},
    {"mma", choose_matrix},
    {"membar", choose_nothing},
    {"fence", choose_fence},
    {"mbarrier", choose_mbarrier},
    {"wgmma", choose_product},
    {"setmaxnreg", choose_registers},
    {"elect", choose_collective},
    {"prefetch", choose_nothing},
    {"prefetchu", choose_nothing},
    {"nanosleep", choose_nothing},
    {"griddepcontrol", choose_nothing},
    {"trap", choose_nothing},
    {"brkpt", choose_nothing},
};

void nothing(Warp&, const Instruction&, u32) {}

void trap(Warp& warp, const Instruction& ins, u32 mask) { fail(warp, ins, mask, "a trap"); }

}  // namespace

bool choose_nothing(Statement& statement) {
  const bool traps = statement.name() == "trap" || statement.name() == "brkpt";
  statement.instruction.handler = traps ? &trap : &nothing;
  return true;
}

// Handles d, a, b(, c) of one type. Results of mul.wide and mad.wide are twice as wide, and so is what
// mad.wide adds.
bool choose_arithmetic(Statement& statement) {
  const std::string& type = statement.type();
  const bool is_small = type == "f16" || type == "bf16" || type == "f16x2" || type == "bf16x2";
  const bool is_float = type == "f32" || type == "f64";
  statement.instruction.handler = is_small   ? small_float_arithmetic(statement)
                                  : is_float ? float_arithmetic(statement)
                                             : integer_arithmetic(statement);
  if (statement.instruction.handler == nullptr) return false;
  const int bits = statement.bits(), of_result = statement.has("wide") ? 2 * bits : bits;
  statement.target(of_result);
  statement.sources(1, 3, bits);
  if (statement.operands.size() > 3) statement.source(3, of_result);
  return true;
}

bool choose(Statement& statement) {
  const auto found = kChoosers.find(statement.name());
  return found != kChoosers.end() && found->second(statement);
}

}  // namespace ptx_machine
