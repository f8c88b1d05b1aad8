// The functions of scores that a process has loaded, by name.
//
// selfattn_ext/flex writes, compiles and loads each once; calls of operators name them.
#pragma once

#include <string>

#include "../core/score_function.h"
#include "../cuda/function/function_kernels.h"

namespace selfattn::ops {

// Loads the shared library at `path` and never unloads it; does nothing if the name is known already. Throws
// std::invalid_argument for a name that is empty or too long, a file that is no shared library, and a library
// without a table.
void load_score_function(const std::string& name, const std::string& path);

// Does the same for a function on CUDA tensors. The numbers and `tensors` are those of ScoreFunctionTable;
// `dims` is the largest rank of a tensor that it reads; make_code compiles kernels that contain it. Throws
// std::invalid_argument if the library has no CUDA kernels.
void load_cuda_score_function(const std::string& name, int64_t score_bytes, const std::string& tensors,
                              int64_t dims, int64_t numbers, cuda::MakeCode make_code);

// nullptr if no function of that name has been loaded.
const ScoreFunctionTable* find_score_function(const char* name);

}  // namespace selfattn::ops
