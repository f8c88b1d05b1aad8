#include "sm80_launch.cuh"

namespace selfattn::cuda::sm80 {

template void run_forward<DType::kBFloat16, 96>(const AttentionParams&, const ForwardOutputs&, cudaStream_t,
                                                void*);
template void run_few_queries<DType::kBFloat16, 96>(const AttentionParams&, const ForwardOutputs&,
                                                    cudaStream_t, void*);
template void run_weights<DType::kBFloat16, 96>(const AttentionParams&, const WeightsOutputs&, cudaStream_t);

}  // namespace selfattn::cuda::sm80
