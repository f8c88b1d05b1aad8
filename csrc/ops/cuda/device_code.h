// The CUDA compiler of the build, its architectures, and the capability of a device.
#pragma once

namespace selfattn::ops {

const char* cuda_compiler();       // "nvcc 13.0.88"
const char* cuda_architectures();  // "7.5, 8.0"

// major * 10 + minor of the current device, whose index this is. Throws std::runtime_error if the library has
// no code for such a device. CUDA is asked only the first time.
int usable_capability(int device);

}  // namespace selfattn::ops
