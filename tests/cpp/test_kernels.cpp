// Every kernel that this machine can run, on plain memory, against the loops in float64. Kernels must stay
// within their buffers, and give the same bits on any number of threads.
#include "attention_case.h"
#include "comparison.h"
#include "cpu/loops/loops.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::AttentionResults;
using test::Buffer;
using test::compare;
using test::compare_statistics;
using test::describe;
using test::near;
using test::option_sets;
using test::Options;
using test::Shape;
using test::tolerance;

TEST(attention_agrees_with_the_loops_in_float64) {
  const Shape shapes[] = {{1, 1, 1, 1, 1, 1, 1},     {2, 4, 2, 17, 35, 7, 5},   {1, 2, 1, 3, 70, 16, 24},
                          {1, 2, 2, 65, 67, 33, 16}, {1, 1, 1, 1, 129, 64, 64}, {1, 2, 1, 48, 9, 0, 3},
                          {1, 2, 1, 5, 6, 4, 0},     {3, 4, 2, 2, 5, 17, 9}};
  const cpu::ThreadPool pool = test::thread_pool(2);
  for (const Shape& shape : shapes) {
    for (const DType dtype : test::kDTypes) {
      for (const Options& options : option_sets()) {
        AttentionCase c(dtype, shape, options, shape.heads > 1);
        AttentionCase wide = c.in_float64();
        const AttentionResults expected(cpu::kLoops, wide, pool);
        for (const cpu::Kernel* kernel : test::available_kernels()) {
          const AttentionResults got(*kernel, c, pool);
          const auto expected_list = expected.all(options);
          const auto got_list = got.all(options);
          compare_statistics(got, expected, tolerance(dtype), describe(*kernel, dtype, shape, options));
          for (size_t n = 0; n < got_list.size(); ++n) {
            if (std::string(got_list[n].first).rfind("row_", 0) == 0) continue;
            compare(*got_list[n].second, *expected_list[n].second, tolerance(dtype),
                    describe(*kernel, dtype, shape, options) + ": " + got_list[n].first,
                    std::string(got_list[n].first) == "grad_slopes_rows");
          }
        }
      }
    }
  }
}

TEST(results_do_not_depend_on_the_threads) {
  // The second shape has two chunks of keys, whose items wait for each other at dQ and at the mask's
  // gradient.
  for (const Shape& shape : {Shape{2, 4, 2, 70, 130, 16, 20}, Shape{2, 2, 1, 49, 530, 8, 4}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Options& options : option_sets()) {
        AttentionCase c(dtype, shape, options);
        for (const cpu::Kernel* kernel : test::available_kernels()) {
          const AttentionResults one(*kernel, c, test::thread_pool(1));
          for (const cpu::ThreadPool& pool : {test::thread_pool(3), test::serial_pool(4)}) {
            const AttentionResults several(*kernel, c, pool);
            const auto a = one.all(options), b = several.all(options);
            for (size_t n = 0; n < a.size(); ++n) {
              CHECK_FOR(a[n].second->has_bits_of(*b[n].second),
                        describe(*kernel, dtype, shape, options) + ": " + a[n].first);
            }
          }
        }
      }
    }
  }
}

TEST(only_minus_infinity_hides_in_a_mask_of_wider_range) {
  // Numbers are finite in float64 and beyond float32: the bias is shared by all keys, so every key keeps the
  // same weight.
  Options options;
  options.mask = true;
  AttentionCase c(DType::kFloat32, {1, 1, 1, 2, 5, 2, 2}, options);
  c.mask = Buffer(DType::kFloat64, {1, 1, 2, 5});
  for (int64_t n = 0; n < 10; ++n) c.mask.set(n, n == 7 ? -INFINITY : -1e300);
  for (const cpu::Kernel* kernel : test::available_kernels()) {
    const AttentionResults r(*kernel, c, test::thread_pool(1));
    const std::string what = describe(*kernel, c.dtype, c.shape, options);
    for (int64_t n = 0; n < 10; ++n) {
      const double expected = n < 5 ? 0.2 : (n == 7 ? 0.0 : 0.25);
      CHECK_FOR(near(r.weights.get(n), expected, 1e-6, std::fabs(expected)), what);
    }
  }
}

TEST(scores_agree_with_the_loops_in_float64) {
  const cpu::ThreadPool pool = test::thread_pool(2);
  for (const Shape& shape :
       {Shape{2, 4, 2, 17, 35, 7, 1}, Shape{1, 2, 1, 1, 65, 64, 1}, Shape{1, 1, 1, 3, 2, 0, 1}}) {
    for (const DType dtype : test::kDTypes) {
      const auto run = [&](const cpu::Kernel& kernel, AttentionCase& c, Buffer& scores, Buffer& grad_query,
                           Buffer& grad_key) {
        ScoresParams p;
        p.batch = shape.batch;
        p.heads = shape.heads;
        p.kv_heads = shape.kv_heads;
        p.queries = shape.queries;
        p.keys = shape.keys;
        p.head_dim = shape.head_dim;
        p.dtype = c.dtype;
        p.scale = -0.4;
        p.query = c.query.view();
        p.key = c.key.view();
        p.scores = scores.view();
        kernel.scores(p, pool);
        p.scores = c.grad_weights.view();
        p.grad_query = grad_query.view();
        p.grad_key = grad_key.view();
        kernel.scores_backward(p, pool);
      };
      AttentionCase c(dtype, shape, {}, true);
      AttentionCase wide = c.in_float64();
      Buffer expected_scores = wide.grad_weights, expected_query = wide.query, expected_key = wide.key;
      run(cpu::kLoops, wide, expected_scores, expected_query, expected_key);
      for (const cpu::Kernel* kernel : test::available_kernels()) {
        Buffer scores = c.grad_weights, grad_query = c.query, grad_key = c.key;
        run(*kernel, c, scores, grad_query, grad_key);
        const std::string what = describe(*kernel, dtype, shape, {});
        compare(scores, expected_scores, tolerance(dtype), what + " scores");
        compare(grad_query, expected_query, tolerance(dtype), what + " grad_query");
        compare(grad_key, expected_key, tolerance(dtype), what + " grad_key");
      }
    }
  }
}

TEST(masked_softmax_agrees_with_the_loops_in_float64) {
  const cpu::ThreadPool pool = test::thread_pool(2);
  const Shape shape{2, 3, 1, 9, 37, 1, 1};
  for (const DType dtype : test::kDTypes) {
    for (const Options& options : option_sets()) {
      const auto run = [&](const cpu::Kernel& kernel, AttentionCase& c, Buffer& weights,
                           Buffer& grad_scores) {
        SoftmaxParams p;
        p.batch = shape.batch;
        p.heads = shape.heads;
        p.queries = shape.queries;
        p.keys = shape.keys;
        p.dtype = c.dtype;
        p.scale = 1.3;
        p.window_right = options.window_right >= 0 ? 0 : -1;
        p.query_offset = options.query_offset;
        p.scores = c.grad_weights.view();
        if (options.mask) p.mask = c.mask.broadcast_view();
        p.result = weights.view();
        kernel.masked_softmax(p, pool);
        p.scores = weights.view();
        p.grad = c.grad_weights.view();
        p.result = grad_scores.view();
        kernel.masked_softmax_backward(p, pool);
      };
      AttentionCase c(dtype, shape, options);
      AttentionCase wide = c.in_float64();
      Buffer expected_weights = wide.grad_weights, expected_grad = wide.grad_weights;
      run(cpu::kLoops, wide, expected_weights, expected_grad);
      for (const cpu::Kernel* kernel : test::available_kernels()) {
        Buffer weights = c.grad_weights, grad = c.grad_weights;
        run(*kernel, c, weights, grad);
        const std::string what = describe(*kernel, dtype, shape, options);
        compare(weights, expected_weights, tolerance(dtype), what + " masked_softmax");
        compare(grad, expected_grad, tolerance(dtype), what + " masked_softmax_backward");
      }
    }
  }
}
