// Loads functions of scores, and finds them by name.
#include "score_function_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "boxing.h"
#include "checks.h"
#include "engine.h"

namespace selfattn::ops {

namespace {

constexpr const char* kSymbol = "selfattn_score_function_table";

struct Library {
  std::mutex mutex;
  std::unordered_map<std::string, const ScoreFunctionTable*> tables;
};

// It is never destroyed, because threads may look functions up while the process ends.
Library& library() {
  static auto* const the_only = new Library;
  return *the_only;
}

std::string reason() {
  const char* text = dlerror();
  return text != nullptr ? text : "the reason is unknown";
}

void check_name(const std::string& name) {
  if (!name.empty() && name.size() < sizeof(Name::text)) return;
  refuse("the name of a score function must have 1 to ", sizeof(Name::text) - 1, " characters, but it is \"",
         name, "\"");
}

}  // namespace

void load_score_function(const std::string& name, const std::string& path) {
  check_name(name);
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.tables.count(name) != 0) return;
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) refuse("score function \"", name, "\" cannot be loaded: ", reason());
  const void* const table = dlsym(handle, kSymbol);
  if (table == nullptr) {
    const std::string why = reason();
    dlclose(handle);
    refuse("score function \"", name, "\" has no table: ", why);
  }
  all.tables[name] = static_cast<const ScoreFunctionTable*>(table);
}

void load_cuda_score_function(const std::string& name, int64_t score_bytes, const std::string& tensors,
                              int64_t dims, int64_t numbers, cuda::MakeCode make_code) {
  check_name(name);
  if (cuda_part() == nullptr) {
    refuse("score function \"", name, "\" is for CUDA, and this library has no CUDA kernels");
  }
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.tables.count(name) != 0) return;
  auto* const kinds = new std::string(tensors);  // never destroyed, like the table
  const int64_t count = kinds->empty() ? 0 : 1 + std::count(kinds->begin(), kinds->end(), ' ');
  auto* const table = new ScoreFunctionTable{};
  table->score_bytes = score_bytes;
  table->tensors = kinds->c_str();
  table->numbers = numbers;
  table->device = cuda_part()->function_kernels(std::move(make_code), count, dims, numbers);
  all.tables[name] = table;
}

const ScoreFunctionTable* find_score_function(const char* name) {
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.tables.find(name);
  return found != all.tables.end() ? found->second : nullptr;
}

}  // namespace selfattn::ops
