// Implements capture into graphs, and their launches.
#include "memory.h"
#include "runtime/runtime.h"

namespace ptx_machine {

Graph::~Graph() {
  for (void* pointer : freed) release(pointer);
}

namespace {

// The program's handles of graphs and of executable graphs point to this.
using Handle = std::shared_ptr<Graph>;

Handle& graph_of(void* handle) { return *static_cast<Handle*>(handle); }

u64 captures = 0;

}  // namespace

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  PTX_MACHINE_TURN;
  Stream& stream = stream_of(handle);
  if (&stream == &stream_of(nullptr)) return result(cudaErrorStreamCaptureUnsupported);
  drain_all();
  stream.capture = std::make_shared<Graph>();
  stream.capture_id = ++captures;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  PTX_MACHINE_TURN;
  const Handle captured = stream_of(handle).capture;
  if (captured == nullptr) return result(cudaErrorIllegalState);
  for (Stream* stream : all_streams()) {
    if (stream->capture == captured) stream->capture = nullptr;
  }
  *graph = reinterpret_cast<cudaGraph_t>(new Handle(captured));
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  PTX_MACHINE_TURN;
  const bool capturing = stream_of(stream).capture != nullptr;
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                                        unsigned long long* id, cudaGraph_t* graph,
                                                        const cudaGraphNode_t** dependencies,
                                                        const cudaGraphEdgeData** edges, size_t* count) {
  PTX_MACHINE_TURN;
  const Stream& stream = stream_of(handle);
  static Handle current;
  current = stream.capture;
  *status = current != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = stream.capture_id;
  if (graph != nullptr) *graph = current != nullptr ? reinterpret_cast<cudaGraph_t>(&current) : nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                             unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Handle(graph_of(graph)));
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                    unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph_of(graph)->work.size();
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  PTX_MACHINE_TURN;
  const Handle graph = graph_of(executable);
  submit(stream_of(stream), [graph] {
    for (const Work& work : graph->work) work();
  });
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  PTX_MACHINE_TURN;
  delete &graph_of(graph);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  PTX_MACHINE_TURN;
  delete &graph_of(executable);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned,
                                                    unsigned) {
  *object = nullptr;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
