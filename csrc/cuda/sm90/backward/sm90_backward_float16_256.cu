#include "sm90_backward_launch.cuh"

namespace selfattn::cuda::sm90::backward {

template void run_sides<DType::kFloat16, 256, 256>(const AttentionParams&, const BackwardArguments&,
                                                   const Statistics&, CUstream_st*);

}  // namespace selfattn::cuda::sm90::backward
