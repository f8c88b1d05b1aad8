// Runs one wrapper of csrc/cuda/common/ptx_sm80.cuh on numbers from stdin and writes its results to stdout.
// It runs on the PTX machine, or on a GPU (nvcc -std=c++17 -arch=native -Icsrc
// simulators/ptx_machine/programs/probe.cu), whose answers become golden files
// (simulators/ptx_machine/probe.py).
//
// `probe WRAPPER PROBLEMS` reads 32-bit words [problem][lane][operand] and writes [problem][lane][result].
// `probe device` prints the compute capability and the name; `probe list` prints the wrappers with the
// numbers of their operands and results.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/common/ptx_sm80.cuh"

namespace ptx = selfattn::cuda::ptx;

namespace {

constexpr int kLanes = 32;
constexpr int kMostOperands = 10;
constexpr int kMostResults = 4;
constexpr int kRowBytes = 16;

__device__ float as_float(uint32_t bits) { return __uint_as_float(bits); }

// Operands: a, b, d. Results: d.
enum class Format { kBFloat16, kFloat16 };
__device__ void multiply(Format format, const uint32_t* operand, uint32_t* result) {
  const uint32_t a[4] = {operand[0], operand[1], operand[2], operand[3]};
  const uint32_t b[2] = {operand[4], operand[5]};
  float d[4];
  for (int n = 0; n < 4; ++n) d[n] = as_float(operand[6 + n]);
  if (format == Format::kBFloat16) ptx::multiply_bfloat16(d, a, b);
  if (format == Format::kFloat16) ptx::multiply_float16(d, a, b);
  for (int n = 0; n < 4; ++n) result[n] = __float_as_uint(d[n]);
}

// Operands: the number of the row that this lane asks for, and the four words of its own row.
__device__ void load_matrix(bool transposed, unsigned char* memory, const uint32_t* operand,
                            uint32_t* result) {
  auto* row = reinterpret_cast<uint32_t*>(memory + kRowBytes * threadIdx.x);
  for (int n = 0; n < 4; ++n) row[n] = operand[1 + n];
  __syncthreads();
  const void* asked = memory + kRowBytes * (operand[0] % kLanes);
  uint32_t registers[4];
  transposed ? ptx::load_matrix_x4_transposed(registers, asked) : ptx::load_matrix_x4(registers, asked);
  for (int n = 0; n < 4; ++n) result[n] = registers[n];
}

// Operands: whether to copy, and four words, which are ignored if not. Results: the words in shared memory.
__device__ void copy(unsigned char* memory, const uint32_t* global, uint32_t valid, uint32_t* result) {
  ptx::copy_async_16(memory + kRowBytes * threadIdx.x, global, valid % 2 != 0);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  for (int n = 0; n < 4; ++n) result[n] = reinterpret_cast<uint32_t*>(memory + kRowBytes * threadIdx.x)[n];
}

struct Wrapper {
  const char* name;
  int operands;
  int results;
};

const Wrapper kWrappers[] = {
    {"multiply_bfloat16", 10, 4}, {"multiply_float16", 10, 4},
    {"load_matrix_x4", 5, 4},     {"load_matrix_x4_transposed", 5, 4},
    {"copy_async_16", 8, 4},      {"pack_bfloat16", 2, 1},
    {"pack_float16", 2, 1},       {"exp2_approx", 1, 1},
};
constexpr int kWrapperCount = sizeof(kWrappers) / sizeof(kWrappers[0]);

// Each warp has one problem; `which` is a place in kWrappers.
__global__ void probe(int which, int operands, int results, const uint32_t* in, uint32_t* out) {
  SELFATTN_DYNAMIC_SHARED(memory);
  const size_t lane = size_t{blockIdx.x} * kLanes + threadIdx.x;
  const uint32_t* const mine = in + lane * operands;
  uint32_t operand[kMostOperands] = {};
  uint32_t result[kMostResults] = {};
  for (int n = 0; n < operands; ++n) operand[n] = mine[n];
  switch (which) {
    case 0:
      multiply(Format::kBFloat16, operand, result);
      break;
    case 1:
      multiply(Format::kFloat16, operand, result);
      break;
    case 2:
      load_matrix(false, memory, operand, result);
      break;
    case 3:
      load_matrix(true, memory, operand, result);
      break;
    case 4:
      copy(memory, mine + 4, operand[0], result);
      break;
    case 5:
      result[0] = ptx::pack_bfloat16(as_float(operand[0]), as_float(operand[1]));
      break;
    case 6:
      result[0] = ptx::pack_float16(as_float(operand[0]), as_float(operand[1]));
      break;
    case 7:
      result[0] = __float_as_uint(ptx::exp2_approx(as_float(operand[0])));
      break;
  }
  for (int n = 0; n < results; ++n) out[lane * results + n] = result[n];
}

using selfattn::cuda::check_cuda;

std::string device() {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, 0), "describe the device");
  return std::to_string(properties.major * 10 + properties.minor) + " " + properties.name;
}

std::vector<uint32_t> run(int which, unsigned int problems, const std::vector<uint32_t>& in) {
  const Wrapper& wrapper = kWrappers[which];
  std::vector<uint32_t> out(size_t{problems} * kLanes * wrapper.results);
  uint32_t* memory = nullptr;
  const size_t in_bytes = in.size() * sizeof(uint32_t), out_bytes = out.size() * sizeof(uint32_t);
  check_cuda(cudaMalloc(&memory, in_bytes + out_bytes), "allocate memory");
  check_cuda(cudaMemcpy(memory, in.data(), in_bytes, cudaMemcpyHostToDevice), "copy to the device");
  uint32_t* const results = memory + in.size();
  selfattn::cuda::launch(probe, dim3(problems), dim3(kLanes), kLanes * kRowBytes, nullptr, which,
                         wrapper.operands, wrapper.results, static_cast<const uint32_t*>(memory), results);
  check_cuda(cudaMemcpy(out.data(), results, out_bytes, cudaMemcpyDeviceToHost), "copy from the device");
  check_cuda(cudaFree(memory), "free memory");
  return out;
}

int answer(int count, char** words) {
  const std::string asked = count > 1 ? words[1] : "";
  if (asked == "device") {
    std::printf("%s\n", device().c_str());
    return 0;
  }
  for (int which = 0; which < kWrapperCount; ++which) {
    const Wrapper& wrapper = kWrappers[which];
    if (asked == "list") std::printf("%s %d %d\n", wrapper.name, wrapper.operands, wrapper.results);
    if (asked != wrapper.name || count < 3) continue;
    const auto problems = static_cast<unsigned int>(std::atoi(words[2]));
    std::vector<uint32_t> in(size_t{problems} * kLanes * wrapper.operands);
    if (std::fread(in.data(), sizeof(uint32_t), in.size(), stdin) != in.size()) {
      throw std::runtime_error("too few operands on stdin");
    }
    const std::vector<uint32_t> out = run(which, problems, in);
    std::fwrite(out.data(), sizeof(uint32_t), out.size(), stdout);
    return 0;
  }
  return asked == "list" ? 0 : 2;
}

}  // namespace

int main(int count, char** words) {
  try {
    return answer(count, words);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "probe: %s\n", error.what());
    return 1;
  }
}
