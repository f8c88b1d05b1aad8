#include "launch.cuh"

namespace selfattn::cuda::sm90::backward {

template void run_sides<DType::kFloat16, 96, 96>(const AttentionParams&, const BackwardArguments&,
                                                 const sm80::backward::Statistics&, CUstream_st*);

}  // namespace selfattn::cuda::sm90::backward
