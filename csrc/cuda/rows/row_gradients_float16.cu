#include "row_gradients.cuh"

namespace selfattn::cuda::rows {

template void prepare_of_dtype<DType::kFloat16>(const AttentionParams&, const BackwardArguments&, void*,
                                                const Launch&);

}  // namespace selfattn::cuda::rows
