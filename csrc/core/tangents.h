// The arguments of forward mode and second derivatives: directions, and results along them.
//
// Note [Second derivatives]
//     With t a direction (a tangent for each input), the forward mode gives tangent_out and tangent_lse,
//     which are linear in t. The backward gives the gradients of F = <grad_out, tangent_out> + <grad_lse,
//     tangent_lse> with respect to t. Second derivatives are the gradients of F with respect to the inputs
//     themselves: with t the cotangents of a backward's results they are the gradient of that backward, with
//     t the tangents of its inputs its forward mode, and with t those of a forward mode the gradient of that.
//     The gradient of F with respect to grad_out is tangent_out. So one kernel serves all three.
//
// Note [Formulas of tangents]
//     For query i and key j, with P the softmax weights, keep the factors of dropout, cap' and cap'' the
//     derivatives of the softcap, t in front of a name for its tangent and d for its gradient. The sink is
//     one more key without a value.
//
//       Tdot_ij = scale (tq_i·k_j + q_i·tk_j)               the tangent of the scaled dot product
//       T_ij    = cap'_ij Tdot_ij − tslope |i + offset − j| + tmask_ij
//       m_i     = Σ_j P_ij T_ij                             = tlse_i
//       tout_i  = Σ_j keep_ij P_ij ((T_ij − m_i) v_j + tv_j)
//
//       dP_ij   = keep_ij Σ_e dout_ie v_je                  U_ij = keep_ij Σ_e dout_ie tv_je
//       delta_i = Σ_e dout_ie out_ie + grad_row_i           ds_ij = P_ij (dP_ij − delta_i)
//       A_ij    = dP_ij (T_ij − m_i) − delta_i T_ij + U_ij  of the sink: −delta_i tsink
//       c_i     = Σ_j P_ij A_ij
//       g_ij    = P_ij (A_ij − c_i)                         the gradient of F by the finished score
//       x_ij    = cap'_ij g_ij + cap''_ij ds_ij Tdot_ij     the same by the scaled dot product
//       gq_i    = scale Σ_j (x_ij k_j + cap'_ij ds_ij tk_j)
//       gk_j    = scale Σ_i (x_ij q_i + cap'_ij ds_ij tq_i)
//       gv_j    = Σ_i keep_ij P_ij (T_ij − m_i) dout_i      gmask_ij = g_ij, and so on
#pragma once

#include "attention_params.h"
#include "sequences.h"

namespace selfattn {

// A tangent for each input of attention; one that is missing is 0.
struct Tangents {
  View query;                // nullable; shaped as query, last stride 1
  View key;                  // nullable; shaped as key (of pages: the same pages), last stride 1
  View value;                // nullable; shaped as value, likewise
  View mask;                 // nullable; shaped as the mask, of a float type; read where that is visible
  HeadScalars alibi_slopes;  // nullable; shaped as the slopes, in the accumulation type
  HeadScalars sinks;         // nullable; likewise
};

struct JvpArguments {
  Tangents tangents;
  ForwardOutputs forward;       // the results of attention, without their tangents
  View tangent_out;             // (batch, heads, queries, value_dim), last stride 1
  void* tangent_lse = nullptr;  // laid out as row_max; 0 where a row sees nothing
};

struct BackwardBackwardArguments {
  Tangents tangents;
  // grad_out, out, the row statistics, and grad_row, which is -grad_lse; no grad_weights. Its results are
  // the gradients of F: Note [Second derivatives].
  BackwardArguments backward;
  View tangent_out;             // as in JvpArguments
  void* tangent_lse = nullptr;  // likewise
};

inline SELFATTN_HOST_DEVICE Tangents element_of(const Tangents& t, const AttentionParams& p, int64_t b) {
  const bool packed_keys = p.sequences.key_starts != nullptr;
  const int64_t key = keys_of(p, b).first;
  Tangents element = t;
  element.query = element_of(t.query, b, p.sequences.query_starts != nullptr, queries_of(p, b).first);
  if (p.pages.table == nullptr) {
    element.key = element_of(t.key, b, packed_keys, key);
    element.value = element_of(t.value, b, packed_keys, key);
  }
  element.mask = mask_of(t.mask, p, b);
  element.alibi_slopes = element_of(t.alibi_slopes, b, statistics_dtype(p.dtype));
  element.sinks = element_of(t.sinks, b, statistics_dtype(p.dtype));
  return element;
}

inline SELFATTN_HOST_DEVICE JvpArguments element_of(const JvpArguments& a, const AttentionParams& p,
                                                    int64_t b) {
  JvpArguments element = a;
  element.tangents = element_of(a.tangents, p, b);
  element.forward = element_of(a.forward, p, b);
  element.tangent_out =
      element_of(a.tangent_out, b, p.sequences.query_starts != nullptr, queries_of(p, b).first);
  element.tangent_lse = moved(a.tangent_lse, first_row_of(p, b), statistics_dtype(p.dtype));
  return element;
}

inline SELFATTN_HOST_DEVICE BackwardBackwardArguments element_of(const BackwardBackwardArguments& a,
                                                                 const AttentionParams& p, int64_t b) {
  BackwardBackwardArguments element = a;
  element.tangents = element_of(a.tangents, p, b);
  element.backward = element_of(a.backward, p, b);
  element.tangent_out =
      element_of(a.tangent_out, b, p.sequences.query_starts != nullptr, queries_of(p, b).first);
  element.tangent_lse = moved(a.tangent_lse, first_row_of(p, b), statistics_dtype(p.dtype));
  return element;
}

// See launch_of in sequences.h: packed tensors lie where the starts say, masks and numbers per head do not.
inline Tangents launch_of(const Tangents& t, const AttentionParams& p, int64_t b) {
  Tangents one = t;
  one.mask = mask_of(t.mask, p, b);
  one.alibi_slopes = element_of(t.alibi_slopes, b, statistics_dtype(p.dtype));
  one.sinks = element_of(t.sinks, b, statistics_dtype(p.dtype));
  return one;
}
inline JvpArguments launch_of(const JvpArguments& a, const AttentionParams& p, int64_t b) {
  JvpArguments one = a;
  one.tangents = launch_of(a.tangents, p, b);
  return one;
}
inline BackwardBackwardArguments launch_of(const BackwardBackwardArguments& a, const AttentionParams& p,
                                           int64_t b) {
  BackwardBackwardArguments one = a;
  one.tangents = launch_of(a.tangents, p, b);
  one.backward = launch_of(a.backward, p, b);
  return one;
}

}  // namespace selfattn
