// Replaces instructions by jumps to stubs that execute them. A signal costs microseconds, many of them where
// a hypervisor intercepts invalid opcodes; a jump costs next to nothing, and every AMX instruction has the
// five bytes that a jump takes.
//
//   site:  jmp stub          stub:  make room below the red zone, save flags and rax
//          ...next                  call enter, with the stub's data in rax
//                                   restore, jmp next
//
// enter saves the other registers and the vector state, and calls run_stub.
#include "patch.h"

#include <cpuid.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "execute.h"

using namespace amx_emulator;

extern "C" {

void selfattn_amx_emulator_enter();

// Which parts of the vector state enter saves; never the tiles, which this processor lacks.
__attribute__((visibility("hidden"))) uint64_t selfattn_amx_emulator_saved = 0;

struct StubData {
  uint64_t address;  // of the instruction
  Instruction instruction;
};

__attribute__((visibility("hidden"))) void selfattn_amx_emulator_run_stub(
    const StubData* data, const uint64_t (*registers)[kRegisters]) {
  execute(data->instruction, data->address, *registers);
}

}  // extern "C"

// On entry, rax holds the StubData; above the return address are the program's rax, its flags and 128 bytes
// of red zone. XRSTOR needs the 64 bytes after the legacy area to be zero before XSAVE fills in what it
// saved.
__asm__(R"(
  .text
  .globl selfattn_amx_emulator_enter
  .hidden selfattn_amx_emulator_enter
  .type selfattn_amx_emulator_enter, @function
selfattn_amx_emulator_enter:
  push %r15
  push %r14
  push %r13
  push %r12
  push %r11
  push %r10
  push %r9
  push %r8
  push %rdi
  push %rsi
  push %rbp
  lea 240(%rsp), %rbp
  push %rbp
  push %rbx
  push %rdx
  push %rcx
  pushq 128(%rsp)
  mov %rax, %rdi
  mov %rsp, %rsi
  mov %rsp, %rbx
  sub $4096, %rsp
  and $-64, %rsp
  xor %eax, %eax
  mov %rax, 512(%rsp)
  mov %rax, 520(%rsp)
  mov %rax, 528(%rsp)
  mov %rax, 536(%rsp)
  mov %rax, 544(%rsp)
  mov %rax, 552(%rsp)
  mov %rax, 560(%rsp)
  mov %rax, 568(%rsp)
  mov selfattn_amx_emulator_saved(%rip), %eax
  xor %edx, %edx
  xsave64 (%rsp)
  cld
  call selfattn_amx_emulator_run_stub
  mov selfattn_amx_emulator_saved(%rip), %eax
  xor %edx, %edx
  xrstor64 (%rsp)
  mov %rbx, %rsp
  add $8, %rsp
  pop %rcx
  pop %rdx
  pop %rbx
  add $8, %rsp
  pop %rbp
  pop %rsi
  pop %rdi
  pop %r8
  pop %r9
  pop %r10
  pop %r11
  pop %r12
  pop %r13
  pop %r14
  pop %r15
  ret
  .size selfattn_amx_emulator_enter, . - selfattn_amx_emulator_enter
)");

namespace amx_emulator {

namespace {

constexpr int kJumpBytes = 5;
constexpr int kLine = 64;  // bytes of a cache line
constexpr uint8_t kJump = 0xe9;

// Code and data of one stub.
struct Stub {
  uint8_t code[kLine];
  StubData data;
};

// Stubs within reach of a jump from the code that they serve.
struct Arena {
  Stub* stubs;
  int used;
};
constexpr int kStubsOfArena = 512;
constexpr int kArenas = 64;
Arena arenas[kArenas];
int arena_count = 0;
std::atomic_flag busy = ATOMIC_FLAG_INIT;

bool within_jump(uint64_t from, uint64_t to) {
  const auto distance = static_cast<int64_t>(to - from);
  constexpr int64_t kReach = 0x7ff00000;
  return distance > -kReach && distance < kReach;
}

// The parts of the vector state that the processor and the operating system have; 0 means to patch nothing.
uint64_t saved_state() {
  constexpr uint64_t kVectors = 0xe7;  // x87, xmm, ymm, opmask, zmm
  constexpr unsigned kRoom = 4096;     // what enter sets aside
  const char* wish = std::getenv("SELFATTN_AMX_EMULATOR_PATCH");
  if (wish != nullptr && std::strcmp(wish, "0") == 0) return 0;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & (1u << 27)) == 0) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const uint64_t saved = low & kVectors;
  for (unsigned part = 2; part < 8; ++part) {
    if (((saved >> part) & 1) == 0) continue;
    __get_cpuid_count(0xd, part, &eax, &ebx, &ecx, &edx);
    if (ebx + eax > kRoom) return 0;
  }
  return saved;
}

__attribute__((constructor)) void prepare() { selfattn_amx_emulator_saved = saved_state(); }

Stub* new_stub(uint64_t near) {
  for (int n = 0; n < arena_count; ++n) {
    Arena& arena = arenas[n];
    if (arena.used < kStubsOfArena && within_jump(near, reinterpret_cast<uint64_t>(arena.stubs))) {
      return &arena.stubs[arena.used++];
    }
  }
  if (arena_count == kArenas) return nullptr;
  constexpr uint64_t kStep = 16 << 20;
  for (uint64_t distance = kStep; distance < (uint64_t{1} << 30); distance += kStep) {
    for (const uint64_t place : {near - distance, near + distance}) {
      if (place < kStep || place > (uint64_t{1} << 47) - kStep) continue;
      void* const memory =
          mmap(reinterpret_cast<void*>(place & ~uint64_t{0xffff}), kStubsOfArena * sizeof(Stub),
               PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
      if (memory == MAP_FAILED) continue;
      arenas[arena_count] = {static_cast<Stub*>(memory), 1};
      return arenas[arena_count++].stubs;
    }
  }
  return nullptr;
}

class Assembler {
 public:
  explicit Assembler(uint8_t* to) : to_(to) {}
  void bytes(const char* text, int count) {
    std::memcpy(to_, text, static_cast<size_t>(count));
    to_ += count;
  }
  void quad(uint64_t value) {
    std::memcpy(to_, &value, sizeof(value));
    to_ += sizeof(value);
  }
  void jump(uint64_t target) {
    const auto offset = static_cast<int32_t>(target - (reinterpret_cast<uint64_t>(to_) + kJumpBytes));
    *to_++ = kJump;
    std::memcpy(to_, &offset, sizeof(offset));
    to_ += sizeof(offset);
  }

 private:
  uint8_t* to_;
};

void write_stub(Stub& stub, uint64_t address, const Instruction& instruction) {
  stub.data = {address, instruction};
  Assembler code(stub.code);
  code.bytes("\x48\x8d\x64\x24\x80", 5);  // lea -128(%rsp), %rsp: flags stay as they are
  code.bytes("\x9c\x50", 2);              // pushfq; push %rax
  code.bytes("\x48\xb8", 2);              // mov $data, %rax
  code.quad(reinterpret_cast<uint64_t>(&stub.data));
  code.bytes("\xff\x15\x0f\x00\x00\x00", 6);          // call *15(%rip): the last quad
  code.bytes("\x58\x9d", 2);                          // pop %rax; popfq
  code.bytes("\x48\x8d\xa4\x24\x80\x00\x00\x00", 8);  // lea 128(%rsp), %rsp
  code.jump(address + static_cast<uint64_t>(instruction.length));
  code.quad(reinterpret_cast<uint64_t>(&selfattn_amx_emulator_enter));
}

// Other threads may be executing the instruction. Eight bytes of one cache line change at once, so these
// threads see either the old instruction, which traps, or the jump.
void write_jump(uint64_t address, uint64_t target) {
  const uint64_t line_end = (address | (kLine - 1)) + 1;
  const uint64_t first = address < line_end - 8 ? address : line_end - 8;
  auto* const place = reinterpret_cast<uint64_t*>(first);
  uint64_t before, after;
  std::memcpy(&before, place, sizeof(before));
  after = before;
  uint8_t jump[kJumpBytes] = {kJump};
  const auto offset = static_cast<int32_t>(target - (address + kJumpBytes));
  std::memcpy(jump + 1, &offset, sizeof(offset));
  std::memcpy(reinterpret_cast<uint8_t*>(&after) + (address - first), jump, kJumpBytes);
  // The store is locked, since a plain store that is not aligned need not be atomic.
  __asm__ volatile("lock cmpxchgq %2, %1" : "+a"(before), "+m"(*place) : "r"(after) : "memory", "cc");
}

void try_patch(uint64_t address, const Instruction& instruction) {
  if (is_patched(address)) return;
  Stub* const stub = new_stub(address);
  if (stub == nullptr) return;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  void* const start = reinterpret_cast<void*>(address & ~(page - 1));
  // The page stays writable: other code may have made it writable before and rely on it, and taking that back
  // could race with that code.
  if (mprotect(start, page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return;
  write_stub(*stub, address, instruction);
  write_jump(address, reinterpret_cast<uint64_t>(stub->code));
}

}  // namespace

bool is_patched(uint64_t address) { return *reinterpret_cast<const volatile uint8_t*>(address) == kJump; }

void patch(uint64_t address, const Instruction& instruction) {
  const bool one_line = address % kLine + kJumpBytes <= kLine;
  if (selfattn_amx_emulator_saved == 0 || instruction.length < kJumpBytes || !one_line) return;
  if (busy.test_and_set(std::memory_order_acquire)) return;  // another thread is patching
  try_patch(address, instruction);
  busy.clear(std::memory_order_release);
}

}  // namespace amx_emulator
