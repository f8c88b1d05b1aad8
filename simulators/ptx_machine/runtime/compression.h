// PTX that nvcc has compressed, as it does by default.
#pragma once

#include <string>

#include "types.h"

namespace ptx_machine {

// Returns the text of an entry of a fatbin that has these flags.
//
// Throws std::runtime_error if the text is compressed in another way than the two that are known, if the data
// are not what they claim to be, and, for zstd, if the machine has no libzstd.so.1.
std::string decompress(u64 flags, const u8* data, size_t bytes, size_t text_bytes);

}  // namespace ptx_machine
