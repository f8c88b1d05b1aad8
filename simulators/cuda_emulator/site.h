// The place where a kernel calls a primitive, for reports.
#pragma once

#include <string>

namespace selfattn::emulator {

struct Site {
  const char* primitive = nullptr;
  const char* file = "";
  int line = 0;

  // As a default argument, this is the place of the call.
  static constexpr Site at(const char* primitive, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE()) {
    return {primitive, file, line};
  }
  bool operator==(const Site& other) const {
    return primitive == other.primitive && file == other.file && line == other.line;
  }
};

// Returns a text like "__syncthreads at forward.cuh:12".
inline std::string to_string(const Site& site) {
  const std::string file = site.file;
  const size_t slash = file.rfind('/');
  return std::string(site.primitive) + " at " + (slash == std::string::npos ? file : file.substr(slash + 1)) +
         ":" + std::to_string(site.line);
}

}  // namespace selfattn::emulator
