#include "execute/products.h"

#include "instructions/tensor_core.h"
#include "execute/races.h"
#include "execute/shared_matrix.h"
#include "execute/warp.h"
#include "instructions/small_numbers.h"
#include "options.h"

namespace ptx_machine {

namespace {

constexpr u32 kRowsOfWarp = 16, kRowsOfGroup = kRowsOfWarp * kWarpsOfGroup, kMostColumns = 256;
constexpr u32 kTile = 8;  // how many columns the model multiplies at a time
static_assert(kMmaRows == kRowsOfWarp && kMmaColumns == kTile && kMmaDepth == kProductDepth);

const Product& text_of(const Warp& warp, const Instruction& ins) {
  return warp.block->kernel->products[ins.target];
}

// Reads a fragment in registers, which lies there as for mma: register n of lane l has two neighbouring
// elements.
void read_fragment(const Warp& warp, const Product& product, u16 (*rows)[kProductDepth]) {
  for (u32 n = 0; n < 4; ++n) {
    const u32* lanes = static_cast<const u32*>(warp.source(product.left[n]));
    for (u32 l = 0; l < kLanes; ++l) {
      std::memcpy(&rows[l / 4 + 8 * (n % 2)][2 * (l % 4) + 8 * (n / 2)], &lanes[l], sizeof(u32));
    }
  }
}

// Computes d = a b or d += a b, for the warp's rows.
//
// Public measurements (mmasim 2.1.1, whose author compared it with an H100) find that wgmma of 16-bit
// elements adds up as mma of the same generation does: 16 products and the accumulator in one step, truncated
// to 25 bits after the binary point of the largest.
template <float (*kConvert)(u16)>
void multiply(Warp& warp, const Product& product, const u16 (*a)[kProductDepth],
              const u16 (*b)[kProductDepth], bool adds) {
  MmaOperands operands;
  operands.smallest_exponent =
      kConvert == float_from_float16 ? kSmallestExponentFloat16 : kSmallestExponentFloat32;
  for (u32 row = 0; row < kRowsOfWarp; ++row) {
    for (u32 k = 0; k < kProductDepth; ++k) operands.a[row][k] = kConvert(a[row][k]);
  }
  for (u32 tile = 0; tile < product.columns / kTile; ++tile) {
    float elements[kTile][kProductDepth];
    for (u32 column = 0; column < kTile; ++column) {
      for (u32 k = 0; k < kProductDepth; ++k) elements[column][k] = kConvert(b[tile * kTile + column][k]);
    }
    for (u32 k = 0; k < kProductDepth; ++k) {
      for (u32 column = 0; column < kTile; ++column) operands.b[k][column] = elements[column][k];
    }
    for (u32 n = 0; n < 4; ++n) {
      const auto* d = reinterpret_cast<const float*>(warp.registers + product.results[4 * tile + n]);
      for (u32 l = 0; l < kLanes; ++l) {
        operands.d[l / 4 + 8 * (n / 2)][2 * (l % 4) + n % 2] = adds ? d[l] : 0.0f;
      }
    }
    multiply_accumulate(operands, options().capability);
    for (u32 n = 0; n < 4; ++n) {
      auto* d = reinterpret_cast<float*>(warp.registers + product.results[4 * tile + n]);
      for (u32 l = 0; l < kLanes; ++l) d[l] = operands.d[l / 4 + 8 * (n / 2)][2 * (l % 4) + n % 2];
    }
  }
}

// Calls f with the offset of each chunk of shared memory that the warp reads.
template <class F>
void for_operands(const Warp& warp, const Instruction& ins, u64 left, u64 right, F&& f) {
  const Product& product = text_of(warp, ins);
  if (!product.left_in_registers) {
    SharedMatrix(warp, ins, left, product.left_turned, kRowsOfGroup)
        .for_chunks(warp.index % kWarpsOfGroup * kRowsOfWarp, kRowsOfWarp, f);
  }
  SharedMatrix(warp, ins, right, product.right_turned, product.columns).for_chunks(0, product.columns, f);
}

void compute(Warp& warp, const Instruction& ins, u64 left, u64 right, bool adds) {
  const Product& product = text_of(warp, ins);
  const u8* const shared = warp.block->shared;
  u16 a[kRowsOfWarp][kProductDepth], b[kMostColumns][kProductDepth];
  if (product.left_in_registers) {
    read_fragment(warp, product, a);
  } else {
    SharedMatrix(warp, ins, left, product.left_turned, kRowsOfGroup)
        .read(shared, warp.index % kWarpsOfGroup * kRowsOfWarp, kRowsOfWarp, a);
  }
  SharedMatrix(warp, ins, right, product.right_turned, product.columns).read(shared, 0, product.columns, b);
  if (product.bfloat16) {
    multiply<float_from_bfloat16>(warp, product, a, b, adds);
  } else {
    multiply<float_from_float16>(warp, product, a, b, adds);
  }
}

}  // namespace

void Products::start(const Kernel& kernel) {
  pending_.clear();
  uses_.assign(kernel.product_registers, 0);
  owners_.assign(kernel.product_registers, nullptr);
  touched_.assign(kernel.product_registers, 0);
  fences_ = closed_ = begun_ = left_ = 0;
}

void Products::touch(const Warp& warp, const Instruction& ins, u32 mask) {
  const u32* const registers = warp.block->kernel->touched.data() + ins.touched;
  for (u32 n = 0; n < ins.touched_count; ++n) {
    if (uses_[registers[n]] != 0) {
      std::string text = "this touches a register of a product before the wait for it";
      for (const Pending& pending : pending_) {
        const Product& product = text_of(warp, *pending.instruction);
        for (const u32 used : product.registers) {
          if (used != registers[n]) continue;
          fail(warp, ins, mask, text + ": " + place_text(*warp.block->kernel, *pending.instruction));
        }
      }
      fail(warp, ins, mask, text);
    }
    touched_[registers[n]] = fences_ + 1;
  }
}

void Products::end(const Warp& warp, const Instruction& ins, u32 mask) const {
  if (pending_.empty()) return;
  fail(warp, ins, mask,
       "a thread ends while its products are on their way: " +
           place_text(*warp.block->kernel, *pending_[0].instruction));
}

void Products::check_registers(const Warp& warp, const Instruction& ins) const {
  const Product& product = text_of(warp, ins);
  if (fences_ == 0) fail(warp, ins, kWholeWarp, "the first product has no wgmma.fence before it");
  for (const u32 used : product.registers) {
    if (touched_[used] != fences_ + 1) continue;
    fail(warp, ins, kWholeWarp, "registers of this product have been touched since the last wgmma.fence");
  }
  // Results may be those of a product on its way, if they are the same registers in the same order.
  for (size_t n = 0; n < product.registers.size(); ++n) {
    const u32 used = product.registers[n];
    const bool is_result = n < product.results.size();
    const Instruction* const owner = owners_[used];
    const bool same = owner != nullptr && text_of(warp, *owner).results == product.results;
    if (is_result ? uses_[used] != 0 && !same : owner != nullptr) {
      fail(warp, ins, kWholeWarp,
           "this product takes registers of another one that is on its way, and does not go on with its "
           "results");
    }
  }
}

void Products::begin(Warp& warp, const Instruction& ins, u64 left, u64 right, bool adds) {
  const Product& product = text_of(warp, ins);
  check_registers(warp, ins);
  Races* const races = warp.block->races;
  for_operands(warp, ins, left, right, [&](u32 offset) {
    if (races != nullptr) races->read_for_product(warp, ins, offset, SharedMatrix::kChunkBytes, begun_);
  });
  for (size_t n = 0; n < product.registers.size(); ++n) {
    ++uses_[product.registers[n]];
    if (n < product.results.size()) owners_[product.registers[n]] = &ins;
  }
  pending_.push_back({&ins, left, right, adds, closed_, false});
  ++begun_;
  ++warp.block->events;
}

void Products::compute_before(Warp& warp, u32 nth) {
  for (size_t n = 0; n < pending_.size() && left_ + n < nth; ++n) {
    Pending& pending = pending_[n];
    if (!pending.done) compute(warp, *pending.instruction, pending.left, pending.right, pending.adds);
    pending.done = true;
  }
}

bool Products::wait(Warp& warp, u32 groups) {
  size_t count = 0;
  while (count < pending_.size() && u64{pending_[count].group} + groups < closed_) ++count;
  if (count == 0) return true;
  const u32 nth = left_ + static_cast<u32>(count);
  Warp* const group = &warp.block->warps[warp.index / kWarpsOfGroup * kWarpsOfGroup];
  for (u32 n = 0; n < kWarpsOfGroup; ++n) {
    if (group[n].products.begun_ < nth) return false;
  }
  for (u32 n = 0; n < kWarpsOfGroup; ++n) group[n].products.compute_before(group[n], nth);
  for (size_t n = 0; n < count; ++n) {
    for (const u32 used : text_of(warp, *pending_[n].instruction).registers) {
      if (--uses_[used] == 0) owners_[used] = nullptr;
    }
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(count));
  left_ = nth;
  if (warp.block->races != nullptr) warp.block->races->wait_for_product(warp, nth - 1);
  return true;
}

}  // namespace ptx_machine
