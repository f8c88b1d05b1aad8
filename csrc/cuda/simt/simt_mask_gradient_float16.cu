#include "mask_gradient.cuh"

namespace selfattn::cuda::simt {

template size_t mask_workspace<DType::kFloat16>(const AttentionParams&, const BackwardArguments&);
template void mask_gradient<DType::kFloat16>(const AttentionParams&, const BackwardArguments&, const Launch&);

}  // namespace selfattn::cuda::simt
