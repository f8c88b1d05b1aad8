#include "backward.cuh"

namespace selfattn::cuda::simt {

template void backward<DType::kFloat16>(const AttentionParams&, const BackwardArguments&, const Launch&);

}  // namespace selfattn::cuda::simt
