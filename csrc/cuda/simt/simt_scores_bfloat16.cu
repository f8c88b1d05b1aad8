#include "masked_softmax.cuh"
#include "score_matrix.cuh"
#include "scores_backward.cuh"

namespace selfattn::cuda::simt {

template void weights<DType::kBFloat16>(const AttentionParams&, const WeightsOutputs&, const Launch&);
template void scores<DType::kBFloat16>(const ScoresParams&, const Launch&);
template void scores_backward<DType::kBFloat16>(const ScoresParams&, const Launch&);
template void masked_softmax<DType::kBFloat16>(const SoftmaxParams&, const Launch&);
template void masked_softmax_backward<DType::kBFloat16>(const SoftmaxParams&, const Launch&);

}  // namespace selfattn::cuda::simt
