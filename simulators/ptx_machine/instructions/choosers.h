// The functions of this folder that give opcodes their handlers. Each returns false for a form that it does
// not know.
#pragma once

#include "decode/statement.h"

namespace ptx_machine {

// integers.cpp, floats.cpp, small_floats.cpp: add, sub, mul, mad, fma, div, rem, min, max, copysign of a type
bool choose_arithmetic(Statement& statement);
Handler integer_arithmetic(const Statement& statement);
Handler float_arithmetic(const Statement& statement);
Handler small_float_arithmetic(const Statement& statement);

bool choose_sign(Statement& statement);        // floats.cpp: neg, abs
bool choose_function(Statement& statement);    // functions.cpp: ex2, lg2, rcp, rsqrt, sqrt, tanh
bool choose_shift(Statement& statement);       // bits.cpp: shl, shr
bool choose_bits(Statement& statement);        // bits.cpp: popc, clz, brev, bfind, prmt, bfe, bfi, lop3, shf
bool choose_move(Statement& statement);        // moves.cpp: mov, cvta
bool choose_logic(Statement& statement);       // predicates.cpp: and, or, xor, not
bool choose_comparison(Statement& statement);  // predicates.cpp: setp, selp, testp
bool choose_conversion(Statement& statement);  // conversions.cpp: cvt
bool choose_load(Statement& statement);        // loads.cpp: ld, ldu, st
bool choose_atomic(Statement& statement);      // atomics.cpp: atom, red
bool choose_copy(Statement& statement);        // copies.cpp: cp.async
bool choose_barrier(Statement& statement);     // collectives.cpp: bar, barrier
bool choose_collective(Statement& statement);  // collectives.cpp: shfl, vote, redux, elect, activemask
bool choose_matrix(Statement& statement);      // matrices.cpp: ldmatrix, mma
bool choose_mbarrier(Statement& statement);    // mbarriers.cpp: mbarrier
bool choose_fence(Statement& statement);       // mbarriers.cpp: fence
bool choose_box_copy(Statement& statement);    // box_copies.cpp: cp.async.bulk.tensor
bool choose_product(Statement& statement);     // products.cpp: wgmma
bool choose_registers(Statement& statement);   // registers.cpp: setmaxnreg
bool choose_nothing(Statement& statement);     // choose.cpp: opcodes without effect here, and trap

}  // namespace ptx_machine
