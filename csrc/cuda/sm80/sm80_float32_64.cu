#include "launch.cuh"

namespace selfattn::cuda::sm80 {

template void run_forward<DType::kFloat32, 64>(const AttentionParams&, const ForwardOutputs&, cudaStream_t,
                                               void*);

}  // namespace selfattn::cuda::sm80
