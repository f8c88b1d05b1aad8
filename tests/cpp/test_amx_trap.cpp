// The AMX emulator among other handlers of SIGILL, in threads, and its counts and permission.
#include "amx_instructions.h"
#include "check.h"

#if !(defined(__linux__) && defined(__x86_64__))

TEST(skipped) { std::printf("skipped: AMX is an extension of x86-64, and its emulator needs Linux\n"); }

#else

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../../simulators/amx/amx_emulator.h"
#include "child_process.h"
#include "cpu/amx_permission.h"

using namespace selfattn;
using namespace selfattn::test;

namespace {

const std::string kIllegal = "signal " + std::to_string(SIGILL) + ": ";

void illegal() { __asm__ volatile("ud2"); }

uint64_t count(const char* mnemonic) { return selfattn_amx_emulator_count(mnemonic); }

TEST(counts) {
  if (native_amx()) return;
  uint8_t memory[64] = {};
  const char* const names[] = {"ldtilecfg", "tilezero",   "tileloadd", "tileloaddt1",
                               "tdpbf16ps", "tilestored", "sttilecfg", "tilerelease"};
  uint64_t before[8];
  for (int n = 0; n < 8; ++n) before[n] = count(names[n]);
  const uint64_t all = count("");
  TileConfig config = TileConfig().all(1, 4);
  ldtilecfg(config);
  TILEZERO(0);
  TILELOADD(1, memory, 0);
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm2" ::"r"(memory), "r"(0L) : "memory");
  TDPBF16PS(0, 1, 2);
  TDPBF16PS(0, 1, 2);
  TILESTORED(0, memory, 0);
  sttilecfg(config);
  tilerelease();
  for (int n = 0; n < 8; ++n)
    CHECK_FOR(count(names[n]) - before[n] == (n == 4 ? 2 : 1), std::string(names[n]));
  CHECK(count("") - all == 9);
  CHECK(count("tdpbssd") == 0);
}

TEST(reports_at_exit) {
  const auto ends = [] {
    ldtilecfg(TileConfig().all(1, 4));
    tilerelease();
    std::exit(0);
  };
  setenv("SELFATTN_AMX_EMULATOR_REPORT", "1", 1);
  const std::string text = in_a_child(ends);
  unsetenv("SELFATTN_AMX_EMULATOR_REPORT");
  CHECK_FOR(text.find("exit 0: amx_emulator: ldtilecfg ") == 0, text);
  CHECK(in_a_child(ends) == "exit 0: ");
}

TEST(other_illegal_instructions_end_the_process) {
  CHECK(in_a_child(illegal) == kIllegal);
  CHECK(in_a_child([] { raise(SIGILL); }) == kIllegal);
  // A byte of AMX at the address of a signal that was sent is not executed.
  CHECK(in_a_child([] { kill(getpid(), SIGILL); }) == kIllegal);
  CHECK(in_a_child([] {
          signal(SIGILL, SIG_IGN);
          raise(SIGILL);
        }) == "exit 0: ");
  CHECK(in_a_child([] {
          signal(SIGILL, SIG_IGN);
          illegal();
        }) == kIllegal);
}

int handled = 0;

void skip_illegal(int, siginfo_t*, void* context) {
  handled += 1;
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 2;
}

void plain_handler(int) {
  if (write(STDERR_FILENO, "plain handler", 13) == 13) _exit(3);
}

TEST(a_handler_installed_later_gets_the_rest) {
  struct sigaction action{}, before{}, seen{};
  action.sa_sigaction = skip_illegal;
  action.sa_flags = SA_SIGINFO;
  CHECK(sigaction(SIGILL, &action, &before) == 0);
  illegal();
  CHECK(handled == 1);
  uint8_t zero[64] = {};
  ldtilecfg(TileConfig().all(1, 4));
  TILELOADD(0, zero, 0);
  tilerelease();
  CHECK(handled == 1);
  illegal();
  CHECK(handled == 2);
  CHECK(sigaction(SIGILL, &before, &seen) == 0);
  CHECK(seen.sa_sigaction == skip_illegal);
  CHECK(in_a_child([] {
          signal(SIGILL, plain_handler);
          illegal();
        }) == "exit 3: plain handler");
  // Other signals are not blocked.
  CHECK(signal(SIGUSR1, SIG_IGN) == SIG_DFL);
  CHECK(signal(SIGUSR1, SIG_DFL) == SIG_IGN);
}

// Computes the sum of k over a row of ones and a column of k, in tiles whose shape depends on the thread.
bool product_of_a_thread(int thread) {
  const int pairs = 3 + thread, rows = 16 - thread;
  uint16_t a[16][32], b[16][32];
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 32; ++n) {
      a[m][n] = 0x3f80;                                          // 1
      b[m][n] = static_cast<uint16_t>(0x3f80 + ((m & 1) << 7));  // 1, 2, 1, 2, ...
    }
  }
  float c[16][16];
  std::memset(c, 0, sizeof(c));
  ldtilecfg(TileConfig().tile(0, rows, 64).tile(1, rows, 4 * pairs).tile(2, pairs, 64));
  TILELOADD(1, a, 64);
  TILELOADD(2, b, 64);
  TILEZERO(0);
  for (int n = 0; n < 50; ++n) TDPBF16PS(0, 1, 2);
  TILESTORED(0, c, 64);
  const float expected = 50.0f * 2.0f * static_cast<float>(pairs + pairs / 2);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      if (c[m][n] != (m < rows ? expected : 0.0f)) return false;
    }
  }
  return true;
}

TEST(threads_have_tiles_of_their_own) {
  const uint64_t before = count("tdpbf16ps");
  bool right[8] = {};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([thread, &right] {
      right[thread] = true;
      for (int n = 0; n < 20; ++n) right[thread] &= product_of_a_thread(thread);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const bool thread_right : right) CHECK(thread_right);
  if (!native_amx()) CHECK(count("tdpbf16ps") - before == 8 * 20 * 50);
}

// Thousands of instructions that have never been executed are met by several threads at about the same time:
// one of them writes the jump there while another looks at what made it trap.
TEST(threads_meet_at_fresh_instructions) {
  constexpr int kSites = 4000, kSlot = 8, kThreads = 4;
  const uint8_t tilezero[kSlot] = {0xc4, 0xe2, 0x7b, 0x49, 0xc0, 0x90, 0x90, 0x90};  // and three nops
  void* const memory = mmap(nullptr, kSites * kSlot + 1, PROT_READ | PROT_WRITE | PROT_EXEC,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  auto* const code = static_cast<uint8_t*>(memory);
  for (int site = 0; site < kSites; ++site) std::memcpy(code + site * kSlot, tilezero, kSlot);
  code[kSites * kSlot] = 0xc3;  // ret
  const uint64_t before = count("tilezero");
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      ldtilecfg(TileConfig().all(16, 64));
      ++ready;
      while (ready < kThreads) std::this_thread::yield();
      reinterpret_cast<void (*)()>(memory)();
      tilerelease();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!native_amx()) CHECK(count("tilezero") - before == kThreads * kSites);
  munmap(memory, kSites * kSlot + 1);
}

// The instruction traps the first time; later a jump has taken its place.
TEST(registers_flags_and_red_zone_survive) {
  ldtilecfg(TileConfig().all(16, 64));
  for (int time = 0; time < 3; ++time) {
    uint64_t seen[16] = {};
    __asm__ volatile(
        "mov $1, %%eax\n\t"
        "mov $2, %%ecx\n\t"
        "mov $3, %%edx\n\t"
        "mov $4, %%esi\n\t"
        "mov $5, %%edi\n\t"
        "mov $6, %%r8d\n\t"
        "mov $7, %%r9d\n\t"
        "mov $8, %%r10d\n\t"
        "mov $9, %%r11d\n\t"
        "mov $10, %%r12d\n\t"
        "mov $11, %%r13d\n\t"
        "mov $12, %%r14d\n\t"
        "mov $13, %%r15d\n\t"
        "movq %%r15, %%xmm13\n\t"
        "movq $14, -8(%%rsp)\n\t"
        "movq $15, -128(%%rsp)\n\t"
        "stc\n\t"
        ".p2align 6\n\t"  // patched only within a cache line
        "tilezero %%tmm0\n\t"
        "mov %%rax, (%%rbx)\n\t"
        "mov %%rcx, 8(%%rbx)\n\t"
        "mov %%rdx, 16(%%rbx)\n\t"
        "mov %%rsi, 24(%%rbx)\n\t"
        "mov %%rdi, 32(%%rbx)\n\t"
        "mov %%r8, 40(%%rbx)\n\t"
        "mov %%r9, 48(%%rbx)\n\t"
        "mov %%r10, 56(%%rbx)\n\t"
        "mov %%r11, 64(%%rbx)\n\t"
        "mov %%r12, 72(%%rbx)\n\t"
        "mov %%r13, 80(%%rbx)\n\t"
        "mov %%r14, 88(%%rbx)\n\t"
        "movq %%xmm13, 96(%%rbx)\n\t"
        "mov -8(%%rsp), %%rcx\n\t"
        "mov %%rcx, 104(%%rbx)\n\t"
        "mov -128(%%rsp), %%rcx\n\t"
        "mov %%rcx, 112(%%rbx)\n\t"
        "setc 120(%%rbx)" ::"b"(seen)
        : "memory", "cc", "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
          "r15", "xmm13");
    for (uint64_t n = 0; n < 15; ++n) CHECK_FOR(seen[n] == n + 1, std::to_string(n));
    CHECK(seen[15] == 1);
  }
}

TEST(vectors_and_masks_survive) {
  if (!cpu::cpu_features().avx512bw) {
    std::printf("skipped: this processor has no AVX-512\n");
    return;
  }
  alignas(64) uint64_t given[8] = {1, 2, 3, 4, 5, 6, 7, 8}, low[8], high[8], mask;
  alignas(64) uint8_t memory[1024] = {};
  ldtilecfg(TileConfig().all(16, 64));
  for (int time = 0; time < 3; ++time) {
    // For the product, the emulator itself uses vectors.
    __asm__ volatile(
        "vmovdqu64 (%0), %%zmm0\n\t"
        "vmovdqu64 (%0), %%zmm29\n\t"
        "kmovq (%0), %%k3\n\t"
        "tileloadd (%4,%5,1), %%tmm1\n\t"
        ".p2align 6\n\t"  // patched only within a cache line
        "tdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t"
        "vmovdqu64 %%zmm0, (%1)\n\t"
        "vmovdqu64 %%zmm29, (%2)\n\t"
        "kmovq %%k3, (%3)\n\t"
        "vzeroupper" ::"r"(given),
        "r"(low), "r"(high), "r"(&mask), "r"(memory), "r"(static_cast<ptrdiff_t>(64))
        : "memory");
    CHECK(std::memcmp(given, low, 64) == 0);
    CHECK(std::memcmp(given, high, 64) == 0);
    CHECK(mask == 1);
  }
}

TEST(on_an_alternative_stack) {
  std::vector<char> memory(1 << 16);
  stack_t stack{}, before{};
  stack.ss_sp = memory.data();
  stack.ss_size = memory.size();
  CHECK(sigaltstack(&stack, &before) == 0);
  CHECK(product_of_a_thread(0));
  CHECK(sigaltstack(&before, nullptr) == 0);
}

TEST(the_library_is_permitted_to_use_it) {
  CHECK(selfattn_emulates_amx());
  CHECK(cpu::amx_permitted());
  CHECK(cpu::amx_unavailable_reason() == nullptr);
}

}  // namespace

#endif
