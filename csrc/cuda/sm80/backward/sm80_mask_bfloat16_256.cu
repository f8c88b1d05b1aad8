#include "sm80_mask_gradient.cuh"

namespace selfattn::cuda::sm80::backward {

template MaskRegions regions_of_mask<DType::kBFloat16, 256>(const AttentionParams&, const BackwardArguments&);
template void run_mask<DType::kBFloat16, 256>(const AttentionParams&, const BackwardArguments&,
                                              const Statistics&, void*, const Launch&);

}  // namespace selfattn::cuda::sm80::backward
