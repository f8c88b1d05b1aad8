#include "places.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace selfattn::emulator {

namespace {

struct Place {
  Site site;  // its primitive is null if the program counter is used instead
  const void* program_counter = nullptr;
};

std::vector<Place>& places() {
  static std::vector<Place> places;
  return places;
}

uint32_t append(const Place& place) {
  places().push_back(place);
  return static_cast<uint32_t>(places().size() - 1);
}

// Returns the lines of a command's output.
std::vector<std::string> output_of(const std::string& command) {
  std::vector<std::string> lines;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return lines;
  char line[1024];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) {
    lines.emplace_back(line);
    if (!lines.back().empty() && lines.back().back() == '\n') lines.back().pop_back();
  }
  pclose(pipe);
  return lines;
}

std::string text_of(const void* program_counter) {
  Dl_info info;
  if (dladdr(program_counter, &info) == 0) return "an unknown place";
  char offset[32];
  // The offset goes one byte back, because a return address may belong to the line after the call.
  std::snprintf(offset, sizeof(offset), "0x%zx",
                static_cast<size_t>(static_cast<const char*>(program_counter) -
                                    static_cast<const char*>(info.dli_fbase)) -
                    1);
  const std::string quoted = std::string("'") + info.dli_fname + "'";
  // addr2line lists functions from the innermost inlined one outwards.
  std::string text;
  for (const std::string& line : output_of("addr2line -i -e " + quoted + " " + offset + " 2>/dev/null")) {
    if (line.compare(0, 2, "??") == 0) break;
    std::string place = line.substr(line.rfind('/') + 1);
    place = place.substr(0, place.find(" ("));
    text += (text.empty() ? "" : " called from ") + place;
  }
  return text.empty() ? std::string(info.dli_fname) + "+" + offset : text;
}

}  // namespace

uint32_t number_of_place(const Site& site) {
  static std::map<std::tuple<const char*, const char*, int>, uint32_t> known;
  const auto [entry, isnew] = known.try_emplace({site.primitive, site.file, site.line}, 0);
  if (isnew) entry->second = append({site, nullptr});
  return entry->second;
}

uint32_t number_of_place(const void* program_counter) {
  static std::unordered_map<const void*, uint32_t> known;
  const auto [entry, isnew] = known.try_emplace(program_counter, 0);
  if (isnew) entry->second = append({Site(), program_counter});
  return entry->second;
}

std::string text_of_place(uint32_t number) {
  const Place& place = places()[number];
  return place.site.primitive != nullptr ? to_string(place.site) : text_of(place.program_counter);
}

}  // namespace selfattn::emulator
