// Calls a function template for the dtype that a call has at run time.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "../../core/dtype.h"

namespace selfattn::cuda {

// Calls function(constant) and returns its result. The constant converts to the dtype at compile time, so
// that a generic lambda may use its parameter as a template argument.
template <class Function>
auto call_for_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(std::integral_constant<DType, DType::kFloat64>());
    case DType::kFloat32:
      return function(std::integral_constant<DType, DType::kFloat32>());
    case DType::kBFloat16:
      return function(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat16:
      return function(std::integral_constant<DType, DType::kFloat16>());
    case DType::kBool:
      break;
  }
  throw std::invalid_argument(std::string("attention of dtype ") + name_of(dtype) + " does not exist");
}

}  // namespace selfattn::cuda
