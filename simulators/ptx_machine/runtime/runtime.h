// What the stand-in for CUDA's runtime keeps: errors, streams, events, graphs.
//
// Work runs at the call as long as its stream has nothing to wait for. torch.cuda._sleep makes a stream busy:
// later work stays in the stream's queue until something synchronises with it. So a missing dependency shows
// as memory that is not written yet, and an event after that work is not reached. Captured work goes into
// graphs in the same form.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "types.h"

#define PTX_MACHINE_EXPORT extern "C" __attribute__((visibility("default")))
// Only one call runs at a time.
#define PTX_MACHINE_TURN const std::lock_guard<std::recursive_mutex> turn(::ptx_machine::turns())

namespace ptx_machine {

std::recursive_mutex& turns();

// Remembers an error for cudaGetLastError, and returns it.
cudaError_t result(cudaError_t error);
// Says on stderr, and in the log, what a program did wrong.
void report(const std::string& text);
u64 reports();

using Work = std::function<void()>;

struct Graph {
  std::vector<Work> work;
  std::vector<void*> freed;  // memory freed during the capture, which the work still needs
  ~Graph();
};

struct Stream {
  std::deque<Work> queue;
  u64 added = 0, done = 0;  // how much work was ever added to the queue, and is done
  bool busy = false;
  std::shared_ptr<Graph> capture;
  u64 capture_id = 0;
  int priority = 0;
};

struct Event {
  Stream* stream = nullptr;  // null if never recorded
  u64 position = 0;          // the event is reached when this much of the stream is done
  std::shared_ptr<Graph> capture;
  u64 capture_id = 0;
  double seconds = 0;
  u32 queries = 0;
};

Stream& stream_of(cudaStream_t handle);
std::set<Stream*>& all_streams();
bool is_capturing();
bool is_any_busy();

// Runs the work now, or adds it to the stream's queue or graph.
void submit(Stream& stream, Work work);
// Does the work in the queue, up to a position.
void drain(Stream& stream, u64 position = ~0ull);
void drain_all();
// Frees memory that the program gives back when no waiting work needs it any more.
void free_when_idle(void* pointer);

u64 launches();
double seconds_in_kernels();
double now();

}  // namespace ptx_machine
