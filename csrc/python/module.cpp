// The Python module: describes the build, the machine and the kernels.
//
// The operators do not pass through here: loading the library registers them with torch, where `ops` looks
// them up.

// No function here has a loop that takes time, and pybind11 takes a third less time to compile this way.
#if defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cpu/cpu_features.h"
#include "../cpu/cpu_kernel_table.h"
#include "../peak/peak.h"
#include "../ops/build_options.h"
#include "../ops/engine.h"
#include "../ops/run_kernel.h"
#include "../ops/score_function_library.h"
#include "../version.h"

#include <torch/headeronly/version.h>

namespace py = pybind11;
using selfattn::cpu::Kernel;
using selfattn::cpu::MemoryReader;

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

// Wraps Python's function so that threads that Python does not know may call it.
selfattn::cuda::MakeCode called_by_any_thread(const py::function& make_code) {
  // It is never released, like the score functions; Python may have ended before C++ does.
  auto* const held = new py::function(make_code);
  return [held](const std::string& kernel, int capability) {
    const py::gil_scoped_acquire gil;
    try {
      return (*held)(kernel, capability).cast<std::vector<std::string>>();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  };
}

void load_cuda_score_function(const std::string& name, int64_t score_bytes, const std::string& tensors,
                              int64_t dims, int64_t numbers, const py::function& make_code) {
  selfattn::ops::load_cuda_score_function(name, score_bytes, tensors, dims, numbers,
                                          called_by_any_thread(make_code));
}

std::string target_torch() {
  const unsigned long long target = SELFATTN_TORCH_TARGET;
  return std::to_string(target >> 56) + "." + std::to_string(target >> 48 & 0xff);
}

py::dict build_info() {
  py::dict info;
  info["version"] = SELFATTN_VERSION;
  info["compiler"] = compiler();
  info["cxx_standard"] = static_cast<long>(__cplusplus);
  info["torch"] = TORCH_VERSION;           // whose headers were used
  info["torch_minimum"] = target_torch();  // the oldest that loads the library
  const selfattn::ops::CudaPart* cuda = selfattn::ops::cuda_part();
  info["cuda"] = cuda != nullptr;
  info["cuda_compiler"] = cuda != nullptr ? py::object(py::str(cuda->compiler)) : py::none();
  info["cuda_architectures"] = cuda != nullptr ? py::object(py::str(cuda->architectures)) : py::none();
  info["cuda_absent"] = SELFATTN_STRINGIZE(SELFATTN_CUDA_ABSENT);
#ifdef __OPTIMIZE__
  info["optimized"] = true;
#else
  info["optimized"] = false;
#endif
  return info;
}

py::dict cpu_features() {
  py::dict features;
  features["architecture"] = selfattn::cpu::cpu_features().architecture;
  for (int i = 0; i < selfattn::cpu::cpu_feature_count(); ++i) {
    const selfattn::cpu::CpuFeature feature = selfattn::cpu::cpu_feature(i);
    features[feature.name] = feature.present;
  }
  return features;
}

// The names of options in the operators' schema.
py::tuple options_in(selfattn::OptionSet options) {
  py::list names;
  for (int n = 0; n < static_cast<int>(selfattn::Option::kCount); ++n) {
    const auto option = static_cast<selfattn::Option>(n);
    if (options.has(option)) names.append(selfattn::name_of(option));
  }
  return py::tuple(names);
}

py::dict describe(const Kernel& kernel, int priority) {
  const char* reason = selfattn::cpu::unavailable_reason(kernel);
  py::dict row;
  row["name"] = kernel.name;
  row["isa"] = kernel.isa;
  row["description"] = kernel.description;
  row["dtypes"] = py::make_tuple("float64", "float32", "bfloat16", "float16");
  row["priority"] = priority;
  row["automatic"] = kernel.automatic;
  row["available"] = reason == nullptr;
  const bool selects = kernel.selected_forward != nullptr;
  row["options"] = options_in(selects ? kernel.options.with({selfattn::Option::kSelection}) : kernel.options);
  row["reason"] = reason == nullptr ? py::object(py::none()) : py::str(reason);
  return row;
}

py::list kernel_table() {
  int count = 0;
  const Kernel* const* kernels = selfattn::cpu::all_kernels(&count);
  py::list table;
  for (int i = 0; i < count; ++i) table.append(describe(*kernels[i], i));
  return table;
}

// A contiguous attention without options, which any kernel takes unless it refuses the dtype or the device.
selfattn::AttentionParams ordinary_attention(selfattn::DType dtype) {
  selfattn::AttentionParams p;
  p.batch = p.heads = p.kv_heads = 1;
  p.queries = p.keys = 1024;
  p.head_dim = p.value_dim = 64;
  p.dtype = dtype;
  for (selfattn::View* view : {&p.query, &p.key, &p.value}) {
    view->dtype = dtype;
    const int64_t stride[4] = {p.queries * p.head_dim, p.queries * p.head_dim, p.head_dim, 1};
    std::copy(std::begin(stride), std::end(stride), view->stride);
  }
  return p;
}

py::list cuda_kernel_table(int capability) {
  py::list table;
  const selfattn::ops::CudaPart* cuda = selfattn::ops::cuda_part();
  if (cuda == nullptr) return table;
  int count = 0;
  const selfattn::cuda::Kernel* const* kernels = cuda->all_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const selfattn::cuda::Kernel& kernel = *kernels[i];
    py::list dtypes;
    std::string reason;
    for (const selfattn::DType dtype : {selfattn::DType::kFloat64, selfattn::DType::kFloat32,
                                        selfattn::DType::kBFloat16, selfattn::DType::kFloat16}) {
      reason = cuda->refusal_of(kernel, ordinary_attention(dtype), capability);
      if (reason.empty()) dtypes.append(selfattn::name_of(dtype));
    }
    const bool available = py::len(dtypes) > 0;
    py::dict row;
    row["name"] = kernel.name;
    row["isa"] = "cuda";
    row["description"] = kernel.description;
    row["dtypes"] = py::tuple(dtypes);
    row["priority"] = i;
    row["automatic"] = true;
    row["available"] = available;
    row["options"] = options_in(kernel.options);
    row["reason"] = available ? py::object(py::none()) : py::str(reason);
    table.append(row);
  }
  return table;
}

py::dict choose_kernel(const std::string& name) {
  const Kernel& chosen = selfattn::cpu::choose_kernel(name.c_str());
  int count = 0;
  const Kernel* const* kernels = selfattn::cpu::all_kernels(&count);
  int priority = 0;
  while (priority < count && kernels[priority] != &chosen && kernels[priority]->when_forced != &chosen) {
    ++priority;
  }
  return describe(chosen, priority);
}

double multiply_add_gflops(const std::string& isa, double seconds) {
  return selfattn::cpu::multiply_add_gflops(isa, seconds, selfattn::ops::thread_pool());
}

double read_gbs(int64_t bytes, double seconds) {
  return selfattn::cpu::read_gbs(bytes, seconds, selfattn::ops::thread_pool());
}

}  // namespace

// What functions here share is immutable, atomic or locked, so that Python's global lock is not needed.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module, py::mod_gil_not_used()) {
  module.doc() = "Introspection of the compiled selfattn_ext library; loading it registers the operators.";
  const std::string op_namespace = SELFATTN_STRINGIZE(SELFATTN_NAMESPACE);
  module.attr("op_namespace") = op_namespace;
  module.attr("ops") = py::module_::import("torch").attr("ops").attr(op_namespace.c_str());

  module.def("build_info", &build_info, "Version, compiler, torch and CUDA of the build, as a dict.");
  module.def("cpu_features", &cpu_features,
             "The architecture (str), and which instruction sets this machine has (bool each).");
  module.def("kernel_table", &kernel_table,
             "Every compiled CPU kernel, best first, as dicts: name, isa, description, dtypes, priority, "
             "automatic, available, options, reason (why not available, or None).");
  module.def("cuda_kernel_table", &cuda_kernel_table, py::arg("capability"),
             "The same for the CUDA kernels on devices of compute capability major * 10 + minor; empty in a "
             "build without CUDA.");
  module.def(
      "choose_kernel", &choose_kernel, py::arg("name") = "",
      "The row of kernel_table() that a call takes, given '' (automatic) or a kernel's name. ValueError "
      "if there is none.");
  module.def("load_score_function", &selfattn::ops::load_score_function, py::arg("name"), py::arg("path"),
             "Load the shared library with a function of scores, so that operators find it by its name (1 to "
             "31 characters); nothing happens for a known name. ValueError if the file is no such library.");
  module.def(
      "load_cuda_score_function", &load_cuda_score_function, py::arg("name"), py::arg("score_bytes"),
      py::arg("tensors"), py::arg("dims"), py::arg("numbers"), py::arg("make_code"),
      "The same for CUDA tensors: the function is for scores of 4 or 8 bytes and reads tensors of these "
      "dtypes ('float32[2] int64[1]'), of at most `dims` dimensions, and so many numbers. "
      "make_code(kernel, capability) returns the code (list of bytes, best first) of a kernel named as "
      "in C++ for devices of compute capability major * 10 + minor.");
  module.def("cpu_isa", &selfattn::cpu::forced_isa,
             "The forced instruction set, '' when the choice is automatic.");
  module.def(
      "set_cpu_isa", &selfattn::cpu::force_isa, py::arg("name"),
      "Force an instruction set, '' for automatic. ValueError for one that is unknown or not available.");
  module.def("multiply_add_gflops", &multiply_add_gflops, py::arg("isa"), py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>(),
             "GFLOP/s of multiply-adds alone with the instructions of `isa`, on torch's current number of "
             "threads: the best of the runs in `seconds`. ValueError for an unknown or unavailable `isa`.");
  module.def("read_gbs", &read_gbs, py::arg("bytes"), py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>(),
             "GB/s at which torch's current number of threads reads that much memory, likewise.");
  // The class is local to the module, because a process may load this library twice, compiled at run time.
  py::class_<MemoryReader>(module, "MemoryReader", py::module_local(),
                           "A block of `bytes` of memory, to be read again and again.")
      .def(py::init<int64_t>(), py::arg("bytes"))
      .def(
          "seconds",
          [](const MemoryReader& reader, int64_t block_bytes) {
            return reader.seconds(selfattn::ops::thread_pool(), block_bytes);
          },
          py::arg("block_bytes") = 0, py::call_guard<py::gil_scoped_release>(),
          "The seconds in which torch's current number of threads reads all of it once: in its order, or in "
          "blocks of that many bytes in random order.");
}
