#include "runtime/compression.h"

#include <dlfcn.h>

#include <stdexcept>

namespace ptx_machine {

namespace {

// Bits of an entry's flags. nvcc 12.8 and later use zstd by default, and LZ4 with --compress-mode=speed;
// earlier ones have LZ4 alone.
constexpr u64 kLz4 = 0x2000, kZstd = 0x8000;

[[noreturn]] void refuse(const std::string& why) {
  throw std::runtime_error("ptx machine: compressed PTX: " + why +
                           "; nvcc leaves it as it is with --no-compress");
}

// Reads a block of LZ4, without a frame. A token has two lengths (a nibble each; 15 continues in bytes); it
// is followed by literals and by the distance of a match, which the last token lacks.
class Lz4 {
 public:
  Lz4(const u8* data, size_t bytes, size_t text_bytes) : at_(data), end_(data + bytes), most_(text_bytes) {}

  std::string text() {
    while (text_.size() < most_) {
      const u8 token = next();
      for (size_t n = length(token >> 4); n > 0; --n) add(static_cast<char>(next()));
      if (text_.size() < most_) copy_match(token & kContinues);
    }
    return std::move(text_);
  }

 private:
  static constexpr u8 kContinues = 15, kWholeByte = 255;
  static constexpr size_t kLeastMatch = 4;

  u8 next() {
    if (at_ == end_) refuse("it ends too early");
    return *at_++;
  }
  size_t length(u8 nibble) {
    size_t sum = nibble;
    if (nibble == kContinues) {
      u8 more;
      do sum += more = next();
      while (more == kWholeByte);
    }
    return sum;
  }
  void add(char one) {
    if (text_.size() == most_) refuse("it is longer than it says");
    text_.push_back(one);
  }
  void copy_match(u8 nibble) {
    const size_t low = next();
    const size_t distance = low | size_t{next()} << 8;
    if (distance == 0 || distance > text_.size()) refuse("it repeats what is not there");
    // The copy goes byte by byte, because a match may run into what it writes.
    for (size_t n = length(nibble) + kLeastMatch; n > 0; --n) add(text_[text_.size() - distance]);
  }

  const u8* at_;
  const u8* const end_;
  const size_t most_;
  std::string text_;
};

// Uses libzstd, which most systems have for their packages, though seldom with its headers.
std::string zstd(const u8* data, size_t bytes, size_t text_bytes) {
  using Decompress = size_t (*)(void*, size_t, const void*, size_t);
  static void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  static const auto call =
      reinterpret_cast<Decompress>(library == nullptr ? nullptr : dlsym(library, "ZSTD_decompress"));
  if (call == nullptr) refuse("it needs libzstd.so.1, which is not here");
  std::string text(text_bytes, '\0');
  // Errors are negative numbers.
  if (call(text.data(), text_bytes, data, bytes) != text_bytes) refuse("libzstd cannot read it");
  return text;
}

}  // namespace

std::string decompress(u64 flags, const u8* data, size_t bytes, size_t text_bytes) {
  if ((flags & kZstd) != 0) return zstd(data, bytes, text_bytes);
  if ((flags & kLz4) != 0) return Lz4(data, bytes, text_bytes).text();
  refuse("in a way that is not known");
}

}  // namespace ptx_machine
