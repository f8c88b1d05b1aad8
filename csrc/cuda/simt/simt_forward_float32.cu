#include "forward.cuh"

namespace selfattn::cuda::simt {

template void forward<DType::kFloat32>(const AttentionParams&, const ForwardOutputs&, const Launch&);

}  // namespace selfattn::cuda::simt
