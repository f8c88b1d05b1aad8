// Functions of scores and maps of blocks, on plain memory, against masks with the same numbers. A function
// adds the numbers of a tensor; the loops get these numbers as a mask. The tensor's gradient is the mask's.
#include "attention_case.h"
#include "check.h"
#include "cpu/loops/loops.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::AttentionResults;
using test::Buffer;
using test::Options;
using test::Shape;

namespace {

// Calls visit(element of the captured tensor, score) for the scores of a tile. The tensor has a number for
// each batch element, query and key.
template <class Visit>
void for_each_score(const FunctionInputs& in, const ScoreTile& t, const Visit& visit) {
  const int64_t* stride = in.tensors[0].stride;
  for (int64_t j = 0; j < t.keys; ++j) {
    for (int64_t i = 0; i < t.queries; ++i) {
      visit(t.batch * stride[0] + (t.first_query + i) * stride[1] + (t.first_key + j) * stride[2],
            j * t.stride + i);
    }
  }
}

template <class T>
void add(const FunctionInputs* in, const ScoreTile* tile, void* scores) {
  for_each_score(*in, *tile, [&](int64_t element, int64_t score) {
    static_cast<T*>(scores)[score] += static_cast<const T*>(in->tensors[0].data)[element];
  });
}

template <class T>
void add_captured(const FunctionInputs* in, const ScoreTile* tile, const void*, const void* gradient,
                  double* const* sums) {
  for_each_score(*in, *tile, [&](int64_t element, int64_t score) {
    sums[0][element] += static_cast<double>(static_cast<const T*>(gradient)[score]);
  });
}

template <class T>
constexpr ScoreFunctionTable kAdd = {sizeof(T), "float[3]", 0, add<T>, add<T>, nullptr, add_captured<T>};

// A call with a function, and the same call with a mask.
struct FunctionCase {
  AttentionCase with_function, with_mask;
  Buffer captured;
  std::vector<uint8_t> blocks;
  int64_t size[3], stride[3];
  CapturedTensor tensor;
  int32_t out_of_range = 0;

  FunctionCase(DType dtype, const Shape& s, Options options, int64_t block_size)
      : with_function(dtype, s, options),
        with_mask(with_function.in_float64()),
        captured(AttentionCase::accumulation(dtype), {s.batch, s.queries, s.keys}),
        size{s.batch, s.queries, s.keys},
        stride{s.queries * s.keys, s.keys, 1},
        tensor{captured.data(), size, stride} {
    with_mask.options.mask = true;
    with_mask.mask = Buffer(DType::kFloat64, {s.batch, 1, s.queries, s.keys});
    test::Random random(5);
    for (int64_t n = 0; n < captured.count(); ++n) {
      captured.set(n, random.next() < 0.6 ? random.next() : -INFINITY);
      with_mask.mask.set(n, captured.get(n));
    }
    ScoreFunction& function = with_function.function;
    function.table = dtype == DType::kFloat64 ? &kAdd<double> : &kAdd<float>;
    function.inputs = {&tensor, nullptr, &out_of_range};
    if (block_size > 0) add_map(s, block_size, random);
  }
  FunctionCase(const FunctionCase&) = delete;

  void add_map(const Shape& s, int64_t block_size, test::Random& random) {
    BlockMap& map = with_function.function.map;
    map.query_size = block_size;
    map.key_size = block_size + 1;
    map.query_blocks = s.queries / map.query_size + 1;
    map.key_blocks = s.keys / map.key_size + 1;
    map.stride[0] = map.query_blocks * map.key_blocks;
    map.stride[2] = map.key_blocks;
    for (int64_t n = 0; n < s.batch * map.stride[0]; ++n) {
      blocks.push_back(static_cast<uint8_t>(1.5 * (1 + random.next())));
    }
    map.blocks = blocks.data();
    for (int64_t n = 0; n < captured.count(); ++n) {
      const int64_t batch = n / stride[0], query = n % stride[0] / s.keys, key = n % s.keys;
      const int64_t block =
          batch * map.stride[0] + query / map.query_size * map.stride[2] + key / map.key_size;
      if (blocks[static_cast<size_t>(block)] == 0) with_mask.mask.set(n, -INFINITY);
    }
  }

  // Returns the gradient of the captured tensor for the call that has these results.
  std::vector<double> gradient(const cpu::Kernel& kernel, AttentionResults& results, bool exclusive,
                               const cpu::ThreadPool& pool) {
    BackwardArguments a;
    AttentionCase& c = with_function;
    a.grad_out = c.grad_out.view();
    a.out = results.out.view();
    if (size_of(c.dtype) == 2) a.out_residual = results.out_residual.view();
    a.row_max = results.row_max.data();
    a.row_sum = results.row_sum.data();
    a.grad_row = c.grad_row.data();
    const int64_t count = captured.count();
    std::vector<double> sums(static_cast<size_t>(count));
    CapturedGradients g;
    g.sizes = &count;
    g.count = 1;
    g.sums = sums.data();
    g.exclusive_batch = g.exclusive_query = exclusive;
    kernel.captured_gradients(c.params(), a, g, pool);
    return sums;
  }
};

double tolerance(DType dtype) {
  if (dtype == DType::kFloat64) return 1e-12;
  return dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-3 : 8e-3;
}

std::vector<const cpu::Kernel*> kernels_with_functions() {
  std::vector<const cpu::Kernel*> list;
  for (const cpu::Kernel* kernel : test::available_kernels()) {
    if (kernel->options.has(Option::kFunction)) list.push_back(kernel);
  }
  return list;
}

bool agree(const Buffer& got, const Buffer& expected, double limit) {
  for (int64_t n = 0; n < got.count(); ++n) {
    if (!(std::fabs(got.get(n) - expected.get(n)) <= limit * (1 + std::fabs(expected.get(n))))) return false;
  }
  return got.margins_untouched();
}

std::vector<Options> option_sets() {
  std::vector<Options> sets(3);
  sets[1].slopes = sets[1].sinks = true;
  sets[1].softcap = 1.5;
  sets[2].window_left = 40;
  sets[2].window_right = 9;
  sets[2].dropout = 0.3;
  return sets;
}

}  // namespace

TEST(a_function_that_adds_is_a_mask) {
  const cpu::ThreadPool pool = test::thread_pool(2);
  for (const Shape& shape : {Shape{1, 1, 1, 1, 1, 1, 1}, Shape{2, 4, 2, 17, 35, 7, 5},
                             Shape{1, 2, 1, 3, 70, 16, 24}, Shape{2, 2, 2, 65, 131, 33, 16}}) {
    for (const DType dtype : test::kDTypes) {
      for (const Options& options : option_sets()) {
        for (const int64_t block_size : {0, 1, 16, 100}) {
          FunctionCase c(dtype, shape, options, block_size);
          const AttentionResults expected(cpu::kLoops, c.with_mask, pool);
          const auto all_expected = expected.all(options);
          for (const cpu::Kernel* kernel : kernels_with_functions()) {
            const std::string what = std::string(kernel->isa) + " " + name_of(dtype) + " L" +
                                     std::to_string(shape.queries) + " blocks of " +
                                     std::to_string(block_size) + options.text() + ": ";
            AttentionResults got(*kernel, c.with_function, pool);
            const auto all = got.all(options);
            for (size_t n = 0; n < all.size(); ++n) {
              const std::string name = all[n].first;
              // A kernel may return another number than a row's maximum, as comparison.h says.
              if (name.rfind("row_", 0) == 0) continue;
              const double sums = name == "grad_slopes_rows" ? 100 : 1;
              CHECK_FOR(agree(*all[n].second, *all_expected[n].second, sums * tolerance(dtype)), what + name);
            }
            const std::vector<double> gradient = c.gradient(*kernel, got, true, pool);
            bool near = true;
            for (int64_t n = 0; n < c.captured.count(); ++n) {
              const double exact = expected.grad_mask.get(n);
              near &= std::fabs(gradient[static_cast<size_t>(n)] - exact) <=
                      4 * tolerance(dtype) * (1 + std::fabs(exact));
            }
            CHECK_FOR(near, what + "captured gradient");
          }
        }
      }
    }
  }
}

TEST(threads_change_no_bit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    FunctionCase c(dtype, {2, 4, 2, 130, 530, 16, 20}, Options{}, 50);
    for (const cpu::Kernel* kernel : kernels_with_functions()) {
      AttentionResults one(*kernel, c.with_function, test::thread_pool(1));
      for (const bool exclusive : {false, true}) {
        const auto sums = c.gradient(*kernel, one, exclusive, test::thread_pool(1));
        for (const cpu::ThreadPool& pool : {test::thread_pool(3), test::serial_pool(4)}) {
          const AttentionResults several(*kernel, c.with_function, pool);
          const auto a = one.all(Options{}), b = several.all(Options{});
          for (size_t n = 0; n < a.size(); ++n) {
            CHECK_FOR(a[n].second->has_bits_of(*b[n].second), std::string(kernel->isa) + ": " + a[n].first);
          }
          CHECK_FOR(sums == c.gradient(*kernel, one, exclusive, pool), std::string(kernel->isa));
        }
      }
    }
  }
}
