// Scratch memory in one aligned block, handed out front to back.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

class Arena {
 public:
  explicit Arena(int64_t bytes) : memory_(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
  ~Arena() { ::operator delete(memory_, std::align_val_t(64)); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* take(int64_t count) {
    char* taken = memory_ + used_;
    used_ += bytes_for<T>(count);
    return reinterpret_cast<T*>(taken);
  }
  // Frees all that was handed out.
  void reset() { used_ = 0; }

  template <class T>
  static int64_t bytes_for(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
