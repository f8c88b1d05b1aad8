#include "forward.cuh"

namespace selfattn::cuda::simt {

template void forward<DType::kFloat16>(const AttentionParams&, const ForwardOutputs&, const Launch&);

}  // namespace selfattn::cuda::simt
