// All dtypes are in one file, because without a function these kernels are nearly empty.
#include "captured_gradient.cuh"

namespace selfattn::cuda::simt {

template size_t captured_workspace<DType::kFloat64>(const AttentionParams&, const CapturedGradients&);
template size_t captured_workspace<DType::kFloat32>(const AttentionParams&, const CapturedGradients&);
template size_t captured_workspace<DType::kBFloat16>(const AttentionParams&, const CapturedGradients&);
template size_t captured_workspace<DType::kFloat16>(const AttentionParams&, const CapturedGradients&);
template void captured_gradients<DType::kFloat64>(const AttentionParams&, const BackwardArguments&,
                                                  const CapturedGradients&, const Launch&);
template void captured_gradients<DType::kFloat32>(const AttentionParams&, const BackwardArguments&,
                                                  const CapturedGradients&, const Launch&);
template void captured_gradients<DType::kBFloat16>(const AttentionParams&, const BackwardArguments&,
                                                   const CapturedGradients&, const Launch&);
template void captured_gradients<DType::kFloat16>(const AttentionParams&, const BackwardArguments&,
                                                  const CapturedGradients&, const Launch&);

}  // namespace selfattn::cuda::simt
