// Implements streams and events.
#include <chrono>

#include "memory.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

// Handles up to this number are null, cudaStreamLegacy and cudaStreamPerThread.
constexpr u64 kMostSpecialHandle = 8;
// A program that asks so often waits for the event: on a device, work proceeds meanwhile.
constexpr u32 kMostQueries = 1000;

std::vector<void*>& freed_meanwhile() {
  static auto* const pointers = new std::vector<void*>;
  return *pointers;
}

Stream& default_stream() {
  static auto* const stream = new Stream;
  return *stream;
}

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

}  // namespace

std::recursive_mutex& turns() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

std::set<Stream*>& all_streams() {
  static auto* const streams = new std::set<Stream*>{&default_stream()};
  return *streams;
}

Stream& stream_of(cudaStream_t handle) {
  return reinterpret_cast<u64>(handle) < kMostSpecialHandle ? default_stream()
                                                            : *reinterpret_cast<Stream*>(handle);
}

bool is_capturing() {
  for (const Stream* stream : all_streams()) {
    if (stream->capture != nullptr) return true;
  }
  return false;
}

bool is_any_busy() {
  for (const Stream* stream : all_streams()) {
    if (stream->busy) return true;
  }
  return false;
}

void submit(Stream& stream, Work work) {
  if (stream.capture != nullptr) {
    stream.capture->work.push_back(std::move(work));
  } else if (stream.busy) {
    stream.queue.push_back(std::move(work));
    ++stream.added;
  } else {
    work();
  }
}

void drain(Stream& stream, u64 position) {
  while (!stream.queue.empty() && stream.done < position) {
    const Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    work();
    ++stream.done;
  }
  if (!stream.queue.empty()) return;
  stream.busy = false;
  if (is_any_busy()) return;
  for (void* pointer : freed_meanwhile()) release(pointer);
  freed_meanwhile().clear();
}

void drain_all() {
  for (Stream* stream : all_streams()) drain(*stream);
}

void free_when_idle(void* pointer) { freed_meanwhile().push_back(pointer); }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  PTX_MACHINE_TURN;
  auto* made = new Stream;
  made->priority = priority;
  all_streams().insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
// Streams are kept, because events still refer to them.
PTX_MACHINE_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  PTX_MACHINE_TURN;
  drain(stream_of(stream));
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  PTX_MACHINE_TURN;
  if (stream_of(stream).capture != nullptr) return result(cudaErrorStreamCaptureUnsupported);
  drain(stream_of(stream));
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  PTX_MACHINE_TURN;
  return stream_of(stream).queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
PTX_MACHINE_EXPORT cudaError_t cudaDeviceSynchronize() {
  PTX_MACHINE_TURN;
  if (is_capturing()) return result(cudaErrorStreamCaptureUnsupported);
  drain_all();
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  PTX_MACHINE_TURN;
  Stream& stream = stream_of(handle);
  const Event& event = event_of(event_handle);
  if (event.stream == nullptr) return cudaSuccess;
  if (event.capture != nullptr && event.stream->capture == event.capture) {  // the stream joins the capture
    if (stream.capture == nullptr) stream.capture = event.capture, stream.capture_id = event.capture_id;
    return cudaSuccess;
  }
  if (event.stream->done >= event.position) return cudaSuccess;
  stream.busy = true;
  Stream* const other = event.stream;
  const u64 position = event.position;
  submit(stream, [other, position] { drain(*other, position); });
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  PTX_MACHINE_TURN;
  submit(stream_of(stream), [=] { function(data); });
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                                     void* data, unsigned) {
  PTX_MACHINE_TURN;
  submit(stream_of(stream), [=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

PTX_MACHINE_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
PTX_MACHINE_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  PTX_MACHINE_TURN;
  Stream& recorded = stream_of(stream);
  event_of(handle) = {&recorded, recorded.added, recorded.capture, recorded.capture_id, now(), 0};
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
PTX_MACHINE_EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  PTX_MACHINE_TURN;
  Event& event = event_of(handle);
  if (event.stream == nullptr) return cudaSuccess;
  if (event.capture != nullptr) return result(cudaErrorStreamCaptureUnsupported);
  if (event.stream->done < event.position && ++event.queries > kMostQueries)
    drain(*event.stream, event.position);
  return event.stream->done >= event.position ? cudaSuccess : cudaErrorNotReady;
}
PTX_MACHINE_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  PTX_MACHINE_TURN;
  const Event& event = event_of(handle);
  if (event.stream != nullptr && event.capture == nullptr) drain(*event.stream, event.position);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = static_cast<float>((event_of(end).seconds - event_of(start).seconds) * 1e3);
  return cudaSuccess;
}
