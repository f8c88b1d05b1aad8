#include "tangents.cuh"

namespace selfattn::cuda::simt {

template void jvp<DType::kFloat64>(const AttentionParams&, const JvpArguments&, const Launch&);
template void backward_backward<DType::kFloat64>(const AttentionParams&, const BackwardBackwardArguments&,
                                                 const Launch&);

}  // namespace selfattn::cuda::simt
