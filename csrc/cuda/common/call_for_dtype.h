// From the dtype of a call to the function for it.
#pragma once

#include <stdexcept>
#include <string>

#include "../../core/dtype.h"

namespace selfattn::cuda {

// Calls the function of the params' dtype: one of four with the same arguments.
template <class Result, class Params, class... Arguments>
Result call_for_dtype(const Params& p, Result (*float64)(const Params&, Arguments...),
                      Result (*float32)(const Params&, Arguments...),
                      Result (*bfloat16)(const Params&, Arguments...),
                      Result (*float16)(const Params&, Arguments...), Arguments... arguments) {
  switch (p.dtype) {
    case DType::kFloat64:
      return float64(p, arguments...);
    case DType::kFloat32:
      return float32(p, arguments...);
    case DType::kBFloat16:
      return bfloat16(p, arguments...);
    case DType::kFloat16:
      return float16(p, arguments...);
    case DType::kBool:
      break;
  }
  throw std::invalid_argument(std::string("attention of dtype ") + name_of(p.dtype) + " does not exist");
}

}  // namespace selfattn::cuda
