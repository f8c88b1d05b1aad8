#include "tangents.cuh"

namespace selfattn::cuda::simt {

template void jvp<DType::kBFloat16>(const AttentionParams&, const JvpArguments&, const Launch&);
template void backward_backward<DType::kBFloat16>(const AttentionParams&, const BackwardBackwardArguments&,
                                                  const Launch&);

}  // namespace selfattn::cuda::simt
