#include "tangent_mask.cuh"

namespace selfattn::cuda::simt {

template void tangent_mask<DType::kFloat16>(const AttentionParams&, const BackwardBackwardArguments&,
                                            const Launch&);

}  // namespace selfattn::cuda::simt
