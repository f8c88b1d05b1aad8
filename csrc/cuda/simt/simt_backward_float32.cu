#include "backward.cuh"

namespace selfattn::cuda::simt {

template void backward<DType::kFloat32>(const AttentionParams&, const BackwardArguments&, const Launch&);

}  // namespace selfattn::cuda::simt
