// The loads that several sources of AMX call: kernels_amx.cpp compiles them, the others declare them.
#pragma once

#include "../pairs/load_pieces.h"

#ifdef SELFATTN_COMPILE_SHARED
#define SELFATTN_SHARED template
#else
#define SELFATTN_SHARED extern template
#endif

namespace selfattn::cpu::SELFATTN_ISA {

SELFATTN_SHARED decltype(load_lane_pieces<1>) load_lane_pieces<1>;
SELFATTN_SHARED decltype(load_lane_pieces<2>) load_lane_pieces<2>;
SELFATTN_SHARED decltype(load_lane_pieces<3>) load_lane_pieces<3>;
SELFATTN_SHARED decltype(load_column_pieces<1>) load_column_pieces<1>;
SELFATTN_SHARED decltype(load_column_pieces<2>) load_column_pieces<2>;
SELFATTN_SHARED decltype(load_column_pieces<3>) load_column_pieces<3>;

}  // namespace selfattn::cpu::SELFATTN_ISA
