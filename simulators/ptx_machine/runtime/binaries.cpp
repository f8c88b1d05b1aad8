#include "runtime/binaries.h"

#include <cstddef>
#include <cstdio>
#include <iterator>
#include <map>

#include "options.h"
#include "runtime/compression.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

constexpr u32 kMagic = 0xba55ed50;
constexpr u16 kPtx = 1;  // the kind of an entry; 2 is machine code

// A fatbin has a header, then entries. Fields that are not needed have no name.
struct __attribute__((packed)) Header {
  u32 magic;
  u16 version, header_bytes;
  u64 bytes;
};
struct __attribute__((packed)) Entry {
  u16 kind, unknown;
  u32 header_bytes;
  u64 bytes;
  u32 compressed_bytes;
  u64 other_unknown;
  u32 capability;
  u64 third_unknown;
  u64 flags;
  u64 more_unknown;
  u64 text_bytes;  // the size of the text if it is compressed
};
static_assert(offsetof(Entry, capability) == 28 && offsetof(Entry, flags) == 40 &&
              offsetof(Entry, text_bytes) == 56);

// The argument of __cudaRegisterFatBinary has the address of the data at this offset.
constexpr size_t kOffsetOfData = 8;

std::unordered_map<const void*, Function>& functions() {
  static auto* const functions = new std::unordered_map<const void*, Function>;
  return *functions;
}

std::string text_of(const Entry& entry, const u8* data) {
  const std::string text = entry.compressed_bytes == 0
                               ? std::string(reinterpret_cast<const char*>(data), entry.bytes)
                               : decompress(entry.flags, data, entry.compressed_bytes, entry.text_bytes);
  return text.substr(0, text.find('\0'));  // the text is padded with zeros
}

// The architecture in ".target sm_90a".
struct Target {
  u32 capability = 0;
  bool alone = false;  // true with a letter: no other device runs it
};

Target target_of(const std::string& text) {
  Target target;
  char letter = 0;
  const size_t at = text.find(".target");
  if (at == std::string::npos) return target;
  target.alone = std::sscanf(text.c_str() + at, ".target sm_%u%c", &target.capability, &letter) == 2 &&
                 (letter == 'a' || letter == 'f');
  return target;
}

void read(FatBinary& binary) {
  if (binary.is_read) return;
  binary.is_read = true;
  Header header;
  std::memcpy(&header, binary.data, sizeof header);
  if (header.magic != kMagic) return;
  const u8* at = binary.data + header.header_bytes;
  const u8* const end = at + header.bytes;
  std::map<u32, std::vector<const u8*>> places;  // keyed by the capability that they are for
  while (at < end) {
    Entry entry;
    std::memcpy(&entry, at, sizeof entry);
    if (entry.kind == kPtx) places[entry.capability].push_back(at);
    at += entry.header_bytes + entry.bytes;
  }
  // Like CUDA, this takes the newest texts that the device can run, and among them those for it alone.
  const auto capability = static_cast<u32>(options().capability);
  for (auto beyond = places.upper_bound(capability); beyond != places.begin(); --beyond) {
    const auto& [wanted, these] = *std::prev(beyond);
    std::vector<std::string> texts[2];
    for (const u8* place : these) {
      Entry entry;
      std::memcpy(&entry, place, sizeof entry);
      std::string text = text_of(entry, place + entry.header_bytes);
      const bool alone = target_of(text).alone;
      texts[alone ? 1 : 0].push_back(std::move(text));
    }
    auto& chosen = wanted == capability && !texts[1].empty() ? texts[1] : texts[0];
    for (std::string& text : chosen) binary.modules.push_back(read_module(std::move(text)));
    if (!chosen.empty()) return;
  }
}

}  // namespace

bool device_runs(const std::string& text) {
  const Target target = target_of(text);
  const auto capability = static_cast<u32>(options().capability);
  return target.alone ? target.capability == capability : target.capability <= capability;
}

Function* find_function(const void* host) {
  const auto found = functions().find(host);
  if (found == functions().end()) return nullptr;
  Function& function = found->second;
  if (function.looked_for) return &function;
  function.looked_for = true;
  try {
    read(*function.binary);
    for (const auto& module : function.binary->modules) {
      function.kernel = decode_kernel(*module, function.name);
      if (function.kernel != nullptr) break;
    }
  } catch (const std::exception& error) {
    report(std::string(error.what()) + "\n  in " + function.name);
  }
  return &function;
}

const std::unordered_map<const void*, Function>& all_functions() { return functions(); }

void add_function(const void* host, const Function& function) { functions()[host] = function; }

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT void** __cudaRegisterFatBinary(void* wrapper) {
  PTX_MACHINE_TURN;
  auto* binary = new FatBinary;
  std::memcpy(&binary->data, static_cast<const u8*>(wrapper) + kOffsetOfData, sizeof(binary->data));
  return reinterpret_cast<void**>(binary);
}
PTX_MACHINE_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
PTX_MACHINE_EXPORT void __cudaUnregisterFatBinary(void**) {}
PTX_MACHINE_EXPORT void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int,
                                               uint3*, uint3*, dim3*, dim3*, int*) {
  PTX_MACHINE_TURN;
  Function& function = functions()[host];
  function.binary = reinterpret_cast<FatBinary*>(handle);
  function.name = name;
}
PTX_MACHINE_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
PTX_MACHINE_EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
PTX_MACHINE_EXPORT char __cudaInitModule(void**) { return 1; }
PTX_MACHINE_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
