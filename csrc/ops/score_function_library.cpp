#include "score_function_library.h"

#include <dlfcn.h>

#include <mutex>
#include <unordered_map>

#include "boxing.h"
#include "checks.h"

namespace selfattn::ops {

namespace {

constexpr const char* kSymbol = "selfattn_score_function_table";

struct Library {
  std::mutex mutex;
  std::unordered_map<std::string, const ScoreFunctionTable*> tables;
};

// Never destroyed, as threads may look functions up while the process ends.
Library& library() {
  static auto* const the_only = new Library;
  return *the_only;
}

std::string reason() {
  const char* text = dlerror();
  return text != nullptr ? text : "of an unknown reason";
}

}  // namespace

void load_score_function(const std::string& name, const std::string& path) {
  if (name.empty() || name.size() >= sizeof(Name::text)) {
    refuse("the name of a score function must have 1 to ", sizeof(Name::text) - 1,
           " characters, but it is \"", name, "\"");
  }
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

const ScoreFunctionTable* find_score_function(const char* name) {
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.tables.find(name);
  return found != all.tables.end() ? found->second : nullptr;
}

}  // namespace selfattn::ops
