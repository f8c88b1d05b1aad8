// Opens the target region of AMX, with its vectors and its engine. Strips are two vectors of queries: these
// are two tiles, so that sums over the queries of a strip come in whole steps.
#pragma once

#define SELFATTN_ISA amx
#define SELFATTN_TILE_VECTORS 2
// Decoding prefetches into the level-2 cache, which on these processors has more lines under way than the
// level-1 cache. Measured: float32 and bfloat16 of one query at 98 and 92 % of the read bandwidth instead of
// 93 and 82 %.
#define SELFATTN_FETCH_INTO 2

#include "begin_avx512_bf16.h"
#include "simd_avx512.h"
#include "../pairs/engine_amx.h"
