#include "row_gradients.cuh"

namespace selfattn::cuda::rows {

template void prepare_of_dtype<DType::kBFloat16>(const AttentionParams&, const BackwardArguments&, void*,
                                                 const Launch&);

}  // namespace selfattn::cuda::rows
