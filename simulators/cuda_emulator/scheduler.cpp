#include "scheduler.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>

#include "banks.h"
#include "box_copies.h"
#include "faults.h"
#include "group_products.h"
#include "named_barriers.h"
#include "options.h"
#include "races.h"
#include "register_pool.h"
#include "shared_memory.h"
#include "transaction_barriers.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace selfattn::emulator {

namespace {

Block current_block;
Thread* current_thread = nullptr;
Fiber caller;         // the stack that called launch()
std::string failure;  // why the launch ends early
std::deque<Thread*> ready;
int ended = 0;

void (*kernel_body)(void*) = nullptr;
void* kernel_context = nullptr;

// Takes a thread out of the list. The ends come first, because most schedules take only those, and it is
// quick.
Thread* take(size_t place) {
  Thread* thread = ready[place];
  if (place + 1 == ready.size()) {
    ready.pop_back();
    return thread;
  }
  if (place == 0) {
    ready.pop_front();
    return thread;
  }
  ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(place));
  return thread;
}

// Returns the thread that runs next; nullptr if none can.
Thread* next_thread() {
  if (ready.empty()) return nullptr;
  switch (options().schedule) {
    case Schedule::kFifo:
      return take(0);
    case Schedule::kLifo:
      return take(ready.size() - 1);
    case Schedule::kRandom:
      // The order of the list has no meaning here, and the last thread can be taken without moving the
      // others.
      std::swap(ready[random_number() % ready.size()], ready.back());
      return take(ready.size() - 1);
    case Schedule::kSticky: {
      // One warp runs as far ahead as it can, then the next.
      const int warp = current_thread == nullptr ? 0 : current_thread->warp;
      for (size_t n = ready.size(); n-- > 0;) {
        if (ready[n]->warp == warp) return take(n);
      }
      return take(0);
    }
  }
  return nullptr;
}

std::string index_text(const uint3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) +
         ")";
}

std::string lanes_text(uint32_t lanes) {
  std::string text;
  for (int first = 0; first < kWarpSize; ++first) {
    if ((lanes >> first & 1) == 0) continue;
    int last = first;
    while (last + 1 < kWarpSize && (lanes >> (last + 1) & 1) != 0) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(first) +
            (last > first ? "-" + std::to_string(last) : std::string());
    first = last;
  }
  return text;
}

// Returns a line for each group of a warp's threads that do the same.
std::string what_threads_do() {
  std::map<std::pair<int, std::string>, uint32_t> groups;
  for (const auto& thread : current_block.threads) {
    const std::string doing = thread->ended ? "have ended"
                              : thread->waits_in.primitive == nullptr
                                  ? "can run"
                                  : "wait in " + to_string(thread->waits_in);
    groups[{thread->warp, doing}] |= 1u << thread->lane;
  }
  std::string text;
  for (const auto& [key, lanes] : groups) {
    text += "\n  warp " + std::to_string(key.first) + ": lanes " + lanes_text(lanes) + " " + key.second;
  }
  return text;
}

[[noreturn]] void leave_launch() {
  Fiber::switch_to(current_thread->fiber, caller);
  __builtin_unreachable();
}

// Gives the processor to another thread, and returns when the calling thread runs again.
void give_way() {
  Thread* last = current_thread;
  Thread* next = next_thread();
  if (next == nullptr) {
    if (ended == static_cast<int>(current_block.threads.size())) leave_launch();
    fail("deadlock in block " + index_text(blockIdx) + ": nothing wakes the threads that wait" +
         what_threads_do() + barriers::what_barriers_lack() + named::what_barriers_lack() +
         products::what_groups_lack() + registers::what_groups_lack());
  }
  if (next == last) return;
  current_thread = next;
  threadIdx = next->index;
  Fiber::switch_to(last->fiber, next->fiber);
}

void run_thread() {
  Fiber::entered();
  kernel_body(kernel_context);
  current_thread->copies.finish();
  products::end_thread();
  current_thread->ended = true;
  if (++ended == static_cast<int>(current_block.threads.size())) {
    barriers::end_block();
    named::end_block();
  }
  give_way();
  __builtin_unreachable();
}

void run_block(size_t shared_bytes) {
  shared_memory().start(shared_bytes);
  races::start_block(static_cast<int>(current_block.threads.size()));
  barriers::start_block();
  boxes::start_block();
  named::start_block();
  products::start_block();
  registers::start_block();
  current_block.barrier = Barrier();
  for (Warp& warp : current_block.warps) warp.meetings.clear();
  ended = 0;
  ready.clear();
  for (const auto& thread : current_block.threads) {
    thread->fiber.prepare(&run_thread);
    thread->ended = false;
    thread->waits_in = Site();
    thread->copies.restart();
    ready.push_back(thread.get());
  }
  current_thread = nullptr;
  current_thread = next_thread();
  threadIdx = current_thread->index;
  Fiber::switch_to(caller, current_thread->fiber);
  current_thread = nullptr;
  banks::end_block();
  if (failure.empty()) shared_memory().check_margin();
}

// Threads are numbered as CUDA numbers them: x runs fastest.
void make_threads(dim3 shape) {
  const size_t count = size_t{shape.x} * shape.y * shape.z;
  auto& threads = current_block.threads;
  while (threads.size() < count) threads.push_back(std::make_unique<Thread>());
  threads.resize(count);
  for (size_t n = 0; n < count; ++n) {
    const auto number = static_cast<unsigned int>(n);
    threads[n]->index = {number % shape.x, number / shape.x % shape.y, number / shape.x / shape.y};
    threads[n]->number = static_cast<int>(n);
    threads[n]->warp = static_cast<int>(n) / kWarpSize;
    threads[n]->lane = static_cast<int>(n) % kWarpSize;
  }
  current_block.warps.resize((count + kWarpSize - 1) / kWarpSize);
}

}  // namespace

Block& block() { return current_block; }
Thread& self() { return *current_thread; }
bool in_kernel() { return current_thread != nullptr; }

void wait(const Site& site) {
  Thread& thread = *current_thread;
  thread.waits_in = site;
  boxes::pass();
  products::pass();
  give_way();
  thread.waits_in = Site();  // it may have been woken before it waited
}

void wake(Thread& thread) {
  thread.waits_in = Site();
  ready.push_back(&thread);
}

std::string whereabouts() {
  return "thread " + std::to_string(current_thread->number) + " (warp " +
         std::to_string(current_thread->warp) + ", lane " + std::to_string(current_thread->lane) +
         ") of block " + index_text(blockIdx);
}

void fail(const std::string& what) {
  failure = what;
  leave_launch();
}

void run_grid(dim3 grid, dim3 block_shape, size_t shared_bytes, void (*body)(void* context), void* context) {
  static std::mutex one_launch_at_a_time;
  std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  const FaultHandler faults;
  restart_random_numbers();
  races::start_grid();
  kernel_body = body;
  kernel_context = context;
  failure.clear();
  gridDim = grid;
  blockDim = block_shape;
  make_threads(block_shape);

  // Blocks run one after the other, in an order on which kernels must not rely.
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const Schedule schedule = options().schedule;
  std::vector<uint64_t> order;
  if (schedule == Schedule::kRandom) {
    for (uint64_t n = 0; n < blocks; ++n) order.push_back(n);
    for (uint64_t n = blocks; n > 1; --n) std::swap(order[n - 1], order[random_number() % n]);
  }
  for (uint64_t n = 0; n < blocks && failure.empty(); ++n) {
    const uint64_t number = schedule == Schedule::kRandom ? order[n]
                            : schedule == Schedule::kLifo ? blocks - 1 - n
                                                          : n;
    blockIdx = {static_cast<unsigned int>(number % grid.x),
                static_cast<unsigned int>(number / grid.x % grid.y),
                static_cast<unsigned int>(number / grid.x / grid.y)};
    run_block(shared_bytes);
  }
  if (!failure.empty()) throw std::runtime_error("cuda emulator: " + failure);
}

}  // namespace selfattn::emulator
