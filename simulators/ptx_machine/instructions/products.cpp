// wgmma: products of a warpgroup. target of mma_async: the product's number in Kernel::products; immediate of
// wait_group: how many groups may be on their way.
#include <cstdlib>

#include "execute/warp.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

constexpr u32 kMostColumns = 256, kColumnsOfStep = 8;
// For counts, a warp's part of a product is worth one mma.m16n8k16 for every eight columns.
constexpr u32 kColumnsOfMma = 8;

u64 descriptor_of(const Warp& warp, const Instruction& ins, u32 operand) {
  const u64* lanes = static_cast<const u64*>(warp.source(operand));
  for (int l = 1; l < kLanes; ++l) {
    if (lanes[l] != lanes[0]) fail(warp, ins, 1u << l, "lanes give different matrix descriptors");
  }
  return lanes[0];
}

void begin(Warp& warp, const Instruction& ins, u32) {
  const Product& product = warp.block->kernel->products[ins.target];
  const u32 adds = warp.predicate(product.adds);
  if (adds != 0 && adds != kWholeWarp) fail(warp, ins, adds, "lanes give different scales of a product");
  const u64 left = product.left_in_registers ? 0 : descriptor_of(warp, ins, product.left_matrix);
  const u64 right = descriptor_of(warp, ins, product.right_matrix);
  warpgroup_of(warp, ins).execute(warp, ins, left, right, adds != 0);
  warp.products.begin(warp, ins, left, right, adds != 0);
}

void fence(Warp& warp, const Instruction& ins, u32) {
  warpgroup_of(warp, ins).execute(warp, ins);
  warp.products.fence();
}

void commit(Warp& warp, const Instruction& ins, u32) {
  warpgroup_of(warp, ins).execute(warp, ins);
  warp.products.commit();
}

void wait(Warp& warp, const Instruction& ins, u32) {
  Warpgroup& group = warpgroup_of(warp, ins);
  if (warp.products.wait(warp, static_cast<u32>(ins.immediate))) {
    group.execute(warp, ins);
  } else {
    warp.wait_for(ins, kWholeWarp, Awaited::kProducts);
    warp.give_way(kWholeWarp);
  }
}

bool is_one(const Operand& operand) {
  return operand.kind == Operand::Kind::kImmediate && operand.value == 1;
}

// Reads one of the last operands, which are 0 or 1.
bool read_turn(const Operand& operand, bool* turned) {
  *turned = operand.value == 1;
  return operand.kind == Operand::Kind::kImmediate && operand.value <= 1;
}

// operands: d, a, b, whether the old d is added, signs of a and b, whether a (in memory) and b are turned
bool choose_multiplication(Statement& statement) {
  const auto& operands = statement.operands;
  const std::string& shape = statement.words.at(4);
  Product product;
  product.columns = static_cast<u32>(std::atoi(shape.c_str() + std::strlen("m64n")));
  product.bfloat16 = statement.type() == "bf16";
  const std::string types = product.bfloat16 ? ".f32.bf16.bf16" : ".f32.f16.f16";
  std::string form;
  for (size_t n = 4; n < statement.words.size(); ++n) form += "." + statement.words[n];
  if (form != ".m64n" + std::to_string(product.columns) + "k16" + types) return false;
  if (product.columns % kColumnsOfStep != 0 || product.columns == 0 || product.columns > kMostColumns)
    return false;
  product.left_in_registers = operands.at(1).kind == Operand::Kind::kList;
  if (operands.size() != (product.left_in_registers ? 7 : 8)) return false;
  if (operands[0].list.size() != product.columns / 2 || !is_one(operands[4]) || !is_one(operands[5]))
    return false;
  for (const Operand& part : operands[0].list) product.results.push_back(statement.builder.source(part, 32));
  if (product.left_in_registers) {
    if (operands[1].list.size() != 4) return false;
    for (size_t n = 0; n < 4; ++n) product.left[n] = statement.builder.source(operands[1].list[n], 32);
  } else {
    product.left_matrix = statement.builder.source(operands[1], 64);
    if (!read_turn(operands[6], &product.left_turned)) return false;
  }
  product.right_matrix = statement.builder.source(operands[2], 64);
  product.adds = statement.predicate(operands[3]);
  if (!read_turn(operands.back(), &product.right_turned)) return false;
  statement.instruction.repeats = product.columns / kColumnsOfMma;
  statement.instruction.target = statement.builder.add(std::move(product));
  statement.instruction.handler = &begin;
  return true;
}

}  // namespace

bool choose_product(Statement& statement) {
  Instruction& ins = statement.instruction;
  if (!statement.has("sync") || !statement.has("aligned")) return false;
  ins.kind = Kind::kWholeWarp;
  if (statement.has("mma_async")) return choose_multiplication(statement);
  if (statement.has("fence")) {
    ins.handler = &fence;
  } else if (statement.has("commit_group")) {
    ins.handler = &commit;
  } else if (statement.has("wait_group")) {
    ins.handler = &wait;
    ins.immediate = static_cast<s64>(statement.operands.at(0).value);
  }
  return ins.handler != nullptr;
}

}  // namespace ptx_machine
