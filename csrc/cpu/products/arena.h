// Scratch memory in one aligned block, handed out front to back.
//
// What needs scratch has a function allocate(..., arena), which takes it. The same function says how many
// bytes that is, when it is called with an arena that only counts. It is out of line: each task would have
// two copies of it, and of those of its parts.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

class Arena {
 public:
  // Only counts: there is no memory behind the addresses that it hands out.
  Arena() = default;
  explicit Arena(int64_t bytes) : memory_(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
  ~Arena() { ::operator delete(memory_, std::align_val_t(64)); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* take(int64_t count) {
    const uintptr_t taken = reinterpret_cast<uintptr_t>(memory_) + static_cast<uintptr_t>(used_);
    used_ += bytes_for<T>(count);
    return reinterpret_cast<T*>(taken);
  }
  template <class T>
  T* take_filled(int64_t count, T number) {
    T* const taken = take<T>(count);
    for (int64_t i = 0; memory_ != nullptr && i < count; ++i) taken[i] = number;
    return taken;
  }
  int64_t used() const { return used_; }
  // Frees all that was handed out.
  void reset() { used_ = 0; }

  template <class T>
  static int64_t bytes_for(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }

 private:
  char* memory_ = nullptr;
  int64_t used_ = 0;
};

// Returns the bytes that Part::allocate takes.
template <class Part, class... Arguments>
int64_t bytes_of(const Arguments&... arguments) {
  Part part;
  Arena counted;
  part.allocate(arguments..., counted);
  return counted.used();
}

// The scratch of a worker: parts that lie in one arena, and a session, see operands.h. A JointTask asks for
// its bytes.
template <class Parts, class State>
struct WorkerScratch : Parts {
  Arena arena;
  State session;

  template <class Task>
  static int64_t bytes(const Task& task) {
    return bytes_of<Parts>(task);
  }
  template <class Task>
  explicit WorkerScratch(const Task& task) : arena(bytes(task)) {
    Parts::allocate(task, arena);
  }
  // Lays the memory out for a task's item, unless the last item was the same task's: of several tasks none
  // may need the most of every part.
  template <class Task>
  void lay_out(const Task& task) {
    if (laid_out == &task) return;
    arena.reset();
    Parts::allocate(task, arena);
    laid_out = &task;
  }

 private:
  const void* laid_out = nullptr;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
