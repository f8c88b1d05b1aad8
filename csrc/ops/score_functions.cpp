// Functions of scores: loads them and finds them by name, and checks those of a call, with its captured
// tensors and its map of blocks, for a kernel.
#include "score_function_library.h"

#include <algorithm>
#include <dlfcn.h>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "attention_arguments.h"
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

namespace {

// Longer blocks are cut to this, which changes nothing and is far from overflow.
constexpr int64_t kMostBlockSize = int64_t{1} << 40;

// Functions count batch elements, heads, queries and keys in 32 bits, with room for differences and
// constants.
constexpr int64_t kMostPositions = int64_t{1} << 30;

// Whether 32 bits are too few for the places of a tensor's elements, or of the elements of its gradient,
// which is contiguous. A function is compiled for either 32 or 64 bits.
bool is_wide(const Input& tensor) {
  constexpr int64_t kPlaces = int64_t{1} << 31;
  int64_t reach = 1, elements = 1;
  for (int64_t d = 0; d < tensor.rank; ++d) {
    if (tensor.size[d] == 0) return false;
    if (tensor.size[d] > kPlaces / elements) return true;
    elements *= tensor.size[d];
    reach += (tensor.size[d] - 1) * tensor.stride[d];
  }
  return std::max(reach, elements) >= kPlaces;
}

void check_positions(const AttentionParams& p) {
  for (const auto& [name, size] : {std::pair("batch", p.batch), std::pair("heads", p.heads),
                                   std::pair("queries", p.queries), std::pair("keys", p.keys)}) {
    if (size > kMostPositions) {
      refuse(
          "calls with functions of scores have at most 2**30 batch elements, heads, queries and keys, but ",
          name, " is ", size);
    }
  }
}

// Describes the tensors in the form of ScoreFunctionTable::tensors.
std::string kinds_of(const std::vector<TensorHandle>& captured, const Input& query) {
  std::string kinds;
  for (const TensorHandle& handle : captured) {
    const Input input = inspect("captured", handle, query);
    kinds += (kinds.empty() ? "" : " ") + std::string(dtype_text(input.dtype_code)) + "[" +
             std::to_string(input.rank) + "]" + (is_wide(input) ? "(wide)" : "");
  }
  return kinds;
}

const ScoreFunctionTable* function_table(const char* key, const AttentionParams& p, const Input& query,
                                         const Options& options, size_t numbers) {
  const ScoreFunctionTable* table = find_score_function(key);
  if (table == nullptr) refuse("score_function \"", key, "\" has not been loaded");
  const bool on_cpu = query.device.type == aoti_torch_device_type_cpu();
  if (on_cpu != (table->device == nullptr)) {
    refuse("score_function \"", key, "\" is compiled for ", on_cpu ? "CUDA" : "the CPU", ", but query is on ",
           on_cpu ? "the CPU" : "a GPU");
  }
  const int64_t bytes = size_of(accumulation_dtype(p.dtype));
  if (table->score_bytes != bytes) {
    refuse("score_function \"", key, "\" is compiled for scores of ", table->score_bytes,
           " bytes, but those of ", name_of(p.dtype), " inputs have ", bytes);
  }
  check_positions(p);
  const std::string kinds = kinds_of(options.captured, query);
  if (kinds != table->tensors || static_cast<int64_t>(numbers) != table->numbers) {
    refuse("score_function \"", key, "\" reads the tensors (", table->tensors, ") and ", table->numbers,
           " numbers, but captured are (", kinds, ") and ", numbers, " numbers");
  }
  return table;
}

BlockMap block_map(const AttentionParams& p, const Input& query, const Options& options) {
  const Input map = inspect("block_map", options.block_map, query);
  if (map.dtype_code != aoti_torch_dtype_uint8()) {
    refuse("block_map must be uint8, but it is ", dtype_text(map.dtype_code));
  }
  check_rank(map, 4);
  if ((map.size[0] != 1 && map.size[0] != p.batch) || (map.size[1] != 1 && map.size[1] != p.heads)) {
    refuse("block_map must have the shape (1 or ", p.batch, ", 1 or ", p.heads,
           ", query blocks, key blocks), but its shape is ", shape_text(map.size, map.rank));
  }
  check_last_stride(map);
  if (!options.block_size || options.block_size->size() != 2) {
    refuse("block_size must be given with block_map: how many queries and keys a block has");
  }
  const int64_t queries = (*options.block_size)[0], keys = (*options.block_size)[1];
  if (queries < 1 || keys < 1) {
    refuse("block_size must be two positive numbers, but they are ", queries, " and ", keys);
  }
  // A map without blocks has no memory, but it hides all scores.
  static constexpr uint8_t kNothing = 0;
  BlockMap result;
  result.blocks = map.data != nullptr ? static_cast<const uint8_t*>(map.data) : &kNothing;
  for (int d = 0; d < 3; ++d) result.stride[d] = map.size[d] == 1 ? 0 : map.stride[d];
  result.query_size = std::min(queries, kMostBlockSize);
  result.key_size = std::min(keys, kMostBlockSize);
  result.query_blocks = map.size[3] == 0 ? 0 : map.size[2];
  result.key_blocks = map.size[3];
  return result;
}

}  // namespace

std::vector<CapturedTensor> captured_tensors(const std::vector<TensorHandle>& captured) {
  std::vector<CapturedTensor> tensors;
  tensors.reserve(captured.size());
  for (const TensorHandle& handle : captured) {
    const Input input = inspect("captured", handle);
    tensors.push_back({input.data, input.size, input.stride, input.rank});
  }
  return tensors;
}

void add_score_function(AttentionParams& p, const Input& query, const Options& options) {
  const size_t numbers = options.captured_numbers ? options.captured_numbers->size() : 0;
  const char* key = options.score_function ? options.score_function->text : "";
  if (key[0] != '\0') {
    p.function.table = function_table(key, p, query, options, numbers);
    p.function.inputs.tensors = options.captured_tensors.data();
    p.function.inputs.numbers = numbers > 0 ? options.captured_numbers->data() : nullptr;
    p.function.inputs.out_of_range = &options.out_of_range;
  } else if (!options.captured.empty() || numbers > 0) {
    refuse("captured tensors or numbers were given without score_function");
  }
  if (options.block_map) {
    if (query.device.type != aoti_torch_device_type_cpu() && p.function.table == nullptr) {
      refuse("block_map was given without score_function, which CUDA's kernels need for it");
    }
    p.function.map = block_map(p, query, options);
  } else if (options.block_size) {
    refuse("block_size was given without block_map");
  }
}

}  // namespace selfattn::ops
