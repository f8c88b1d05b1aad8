// The names of options in messages for people.
#pragma once

#include <string>

#include "options.h"

namespace selfattn {

// Returns a list such as "softcap, sinks".
inline std::string names_of(OptionSet options) {
  std::string names;
  for (int n = 0; n < static_cast<int>(Option::kCount); ++n) {
    const auto option = static_cast<Option>(n);
    if (options.has(option)) names += (names.empty() ? "" : ", ") + std::string(name_of(option));
  }
  return names;
}

}  // namespace selfattn
