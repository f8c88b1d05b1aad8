// append_to_cache: writes new keys and values behind those that a cache holds, in place.
#include "append_arguments.h"
#include "operators.h"

namespace selfattn::ops {

void append_to_cache(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle key_cache = stack.tensor();
  const TensorHandle value_cache = stack.tensor();
  TensorHandle key = stack.tensor();
  TensorHandle value = stack.tensor();
  TensorHandle seqlens = stack.tensor();
  TensorHandle cu_seqlens = stack.optional_tensor();
  TensorHandle block_table = stack.optional_tensor();

  const AppendTensors tensors = {key_cache, value_cache, key, value, seqlens, cu_seqlens, block_table};
  Append(tensors, false).run();
}

}  // namespace selfattn::ops
