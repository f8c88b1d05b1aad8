// The functions of scores that a process has loaded, by name. Whoever writes and compiles them
// (selfattn_ext/flex) loads each once; calls of operators name them.
#pragma once

#include <string>

#include "../core/score_function.h"
#include "../cuda/function/function_kernels.h"

namespace selfattn::ops {

// Loads the shared library at `path` for good; nothing happens where the name is known already. Throws
// std::invalid_argument for a name that the operators cannot be given, a file that is no such library, and a
// library without a table.
void load_score_function(const std::string& name, const std::string& path);

// The same of a function for CUDA tensors: what it is for, as ScoreFunctionTable has it, the most dimensions
// of a tensor that it reads, and who makes code of the kernels with it inside. Throws std::invalid_argument
// where the library has no CUDA kernels.
void load_cuda_score_function(const std::string& name, int64_t score_bytes, const std::string& tensors,
                              int64_t dims, int64_t numbers, cuda::MakeCode make_code);

// nullptr where none of that name has been loaded.
const ScoreFunctionTable* find_score_function(const char* name);

}  // namespace selfattn::ops
