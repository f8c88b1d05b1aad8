#include "merge.cuh"

#include "launch.cuh"

namespace selfattn::cuda::sm80 {

template <DType kDType>
void run_merge(const Plan& plan, cudaStream_t stream) {
  const int64_t rows = plan.batches * plan.params.heads * plan.partial_queries;
  launch(&merge_kernel<kDType>, grid_of((rows + kMergeRows - 1) / kMergeRows), dim3(kMergeThreads), 0, stream,
         plan);
}

template void run_merge<DType::kBFloat16>(const Plan&, cudaStream_t);
template void run_merge<DType::kFloat16>(const Plan&, cudaStream_t);
template void run_merge<DType::kFloat32>(const Plan&, cudaStream_t);

}  // namespace selfattn::cuda::sm80
