// Libraries that programs load while they run, which are texts of PTX.
#include "runtime/binaries.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

// A library, and the kernels that the program has asked it for.
struct Library {
  std::unique_ptr<Module> module;
  std::unordered_map<std::string, std::unique_ptr<char>> kernels;  // handles are addresses of these
};

bool is_ptx(const char* code) {
  // Machine code is a file of ELF; fatbins begin with a number of their own.
  const auto first = static_cast<unsigned char>(code[0]);
  return first < 0x80 && first != 0x7f && first != 0x50;
}

}  // namespace

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*,
                                                   void**, unsigned, cudaLibraryOption*, void**, unsigned) {
  PTX_MACHINE_TURN;
  const char* const text = static_cast<const char*>(code);
  if (!is_ptx(text) || !device_runs(text)) return result(cudaErrorNoKernelImageForDevice);
  auto* const made = new Library;
  try {
    made->module = read_module(text);
  } catch (const std::exception& error) {
    report(error.what());
    delete made;
    return result(cudaErrorInvalidPtx);
  }
  *library = reinterpret_cast<cudaLibrary_t>(made);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library,
                                                    const char* name) {
  PTX_MACHINE_TURN;
  auto* const of = reinterpret_cast<Library*>(library);
  std::unique_ptr<char>& handle = of->kernels[name];
  if (handle == nullptr) {
    handle = std::make_unique<char>();
    Function function;
    function.name = name;
    function.looked_for = true;
    try {
      function.kernel = decode_kernel(*of->module, name);
    } catch (const std::exception& error) {
      report(std::string(error.what()) + "\n  in " + name);
    }
    if (function.kernel == nullptr) {
      of->kernels.erase(name);
      return result(cudaErrorSymbolNotFound);
    }
    add_function(handle.get(), function);
  }
  *kernel = reinterpret_cast<cudaKernel_t>(handle.get());
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaFuncGetName(const char** name, const void* host) {
  PTX_MACHINE_TURN;
  const Function* const function = find_function(host);
  if (function == nullptr) return result(cudaErrorInvalidDeviceFunction);
  *name = function->name.c_str();
  return cudaSuccess;
}
