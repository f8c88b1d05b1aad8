// Thread pools for tests: one starts real threads, one runs the bodies one after the other.
#pragma once

#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace selfattn::test {

inline cpu::ThreadPool thread_pool(int threads) {
  return {threads, [](int workers, void (*body)(void*), void* context) {
            std::vector<std::thread> started;
            for (int n = 1; n < workers; ++n) started.emplace_back(body, context);
            body(context);
            for (std::thread& thread : started) thread.join();
          }};
}

inline cpu::ThreadPool serial_pool(int threads) {
  return {threads, [](int workers, void (*body)(void*), void* context) {
            for (int n = 0; n < workers; ++n) body(context);
          }};
}

}  // namespace selfattn::test
