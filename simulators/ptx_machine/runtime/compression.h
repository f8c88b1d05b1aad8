// PTX that nvcc has compressed, which it does unless it is told not to.
#pragma once

#include <string>

#include "types.h"

namespace ptx_machine {

// The text of an entry of a fatbin, which has these flags.
//
// Throws std::runtime_error where it is compressed in another way than the two that are known, where the data
// are not what they claim to be, and for zstd where the machine has no libzstd.so.1.
std::string decompress(u64 flags, const u8* data, size_t bytes, size_t text_bytes);

}  // namespace ptx_machine
