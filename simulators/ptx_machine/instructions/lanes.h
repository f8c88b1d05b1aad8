// Handlers that compute a function of one lane's numbers for all lanes. Lanes that are not in the mask keep
// what they had.
#pragma once

#include "execute/warp.h"

namespace ptx_machine {

// F::f(T) -> D
template <class D, class T, class F>
void unary(Warp& warp, const Instruction& ins, u32 mask) {
  D* d = warp.target<D>(ins, 0);
  const T* a = warp.source<T>(ins, 1);
  if (mask == kWholeWarp) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = static_cast<D>(F::f(a[l]));
  } else {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? static_cast<D>(F::f(a[l])) : d[l];
  }
}

// F::f(T, S) -> D
template <class D, class T, class S, class F>
void binary(Warp& warp, const Instruction& ins, u32 mask) {
  D* d = warp.target<D>(ins, 0);
  const T* a = warp.source<T>(ins, 1);
  const S* b = warp.source<S>(ins, 2);
  if (mask == kWholeWarp) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = static_cast<D>(F::f(a[l], b[l]));
  } else {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? static_cast<D>(F::f(a[l], b[l])) : d[l];
  }
}

// F::f(T, T, C) -> D
template <class D, class T, class C, class F>
void ternary(Warp& warp, const Instruction& ins, u32 mask) {
  D* d = warp.target<D>(ins, 0);
  const T* a = warp.source<T>(ins, 1);
  const T* b = warp.source<T>(ins, 2);
  const C* c = warp.source<C>(ins, 3);
  if (mask == kWholeWarp) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = static_cast<D>(F::f(a[l], b[l], c[l]));
  } else {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? static_cast<D>(F::f(a[l], b[l], c[l])) : d[l];
  }
}

// The handlers if all operands have one type.
template <class T, class F>
constexpr Handler kUnary = &unary<T, T, F>;
template <class T, class F>
constexpr Handler kBinary = &binary<T, T, T, F>;
template <class T, class F>
constexpr Handler kTernary = &ternary<T, T, T, F>;

// The handlers of F<T>, for the unsigned type of so many bits or for the type that PTX names.
template <template <class> class F>
Handler unary_of_bits(int bits) {
  return bits == 16 ? kUnary<u16, F<u16>> : bits == 32 ? kUnary<u32, F<u32>> : kUnary<u64, F<u64>>;
}
template <template <class> class F>
Handler binary_of_bits(int bits) {
  return bits == 16 ? kBinary<u16, F<u16>> : bits == 32 ? kBinary<u32, F<u32>> : kBinary<u64, F<u64>>;
}
template <template <class> class F>
Handler binary_of_type(const std::string& type, int bits) {
  if (type[0] != 's') return binary_of_bits<F>(bits);
  return bits == 16 ? kBinary<s16, F<s16>> : bits == 32 ? kBinary<s32, F<s32>> : kBinary<s64, F<s64>>;
}

}  // namespace ptx_machine
