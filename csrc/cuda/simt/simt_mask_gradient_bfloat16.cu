#include "mask_gradient.cuh"

namespace selfattn::cuda::simt {

template size_t mask_workspace<DType::kBFloat16>(const AttentionParams&, const BackwardArguments&);
template void mask_gradient<DType::kBFloat16>(const AttentionParams&, const BackwardArguments&,
                                              const Launch&);

}  // namespace selfattn::cuda::simt
