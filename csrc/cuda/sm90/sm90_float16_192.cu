#include "sm90_launch.cuh"

namespace selfattn::cuda::sm90 {

template void run_forward<DType::kFloat16, 192, 192>(const AttentionParams&, const ForwardOutputs&,
                                                     cudaStream_t, void*);

}  // namespace selfattn::cuda::sm90
