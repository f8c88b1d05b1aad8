// Every AMX instruction through the emulator in simulators/amx. The tests cover addresses, shapes,
// configuration, faults and threads. The arithmetic is in test_amx_product.cpp.
#include "amx_instructions.h"
#include "check.h"

#if !(defined(__linux__) && defined(__x86_64__))

TEST(skipped) { std::printf("skipped: AMX is an extension of x86-64, and its emulator needs Linux\n"); }

#else

#include <signal.h>
#include <sys/mman.h>

#include <cstring>

#include "child_process.h"

using namespace selfattn;
using namespace selfattn::test;

namespace {

constexpr int kBytes = 1 << 16;
constexpr uint8_t kUntouched = 0xa5;

// Memory whose bytes show their position.
struct Pattern {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kBytes);
  Pattern() {
    for (int n = 0; n < kBytes; ++n) bytes[n] = static_cast<uint8_t>(n * 7 + n / 251);
  }
  const uint8_t* middle() const { return bytes.data() + kBytes / 2; }
};

struct Stored {
  uint8_t rows[16][64];
  Stored() { std::memset(rows, kUntouched, sizeof(rows)); }
};

// Returns whether tile 1 holds the bytes at `base` in steps of `stride`, and nothing beyond its shape.
bool tile1_holds(const uint8_t* base, ptrdiff_t stride, int rows, int row_bytes) {
  Stored stored;
  TILESTORED(1, stored.rows, 64);
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 64; ++c) {
      const bool inside = r < rows && c < row_bytes;
      if (stored.rows[r][c] != (inside ? base[r * stride + c] : kUntouched)) return false;
    }
  }
  return true;
}

// ---- addresses ----

using Load = void (*)(const uint8_t* base, ptrdiff_t stride);

void plain(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile("tileloadd (%%rax,%%rcx,1), %%tmm1" ::"a"(p), "c"(s) : "memory");
}
void short_displacement(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile("tileloadd -16(%%rdx,%%rsi,2), %%tmm1" ::"d"(p + 16), "S"(s / 2) : "memory");
}
void long_displacement(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile("tileloaddt1 -4660(%%rdi,%%rbx,4), %%tmm1" ::"D"(p + 4660), "b"(s / 4) : "memory");
}
void rbp_base(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile(
      "mov %%rbp, %%rbx\n\t"
      "mov %%rax, %%rbp\n\t"
      "tileloadd (%%rbp,%%rcx,1), %%tmm1\n\t"
      "mov %%rbx, %%rbp" ::"a"(p),
      "c"(s)
      : "memory", "rbx");
}
// The signal's frame is written below rsp, that is in the lower half of the pattern's memory.
void rsp_base(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile(
      "mov %%rsp, %%rbx\n\t"
      "mov %%rax, %%rsp\n\t"
      "tileloadd 8(%%rsp,%%rcx,1), %%tmm1\n\t"
      "mov %%rbx, %%rsp" ::"a"(p - 8),
      "c"(s)
      : "memory", "rbx");
}
void r12_base_r13_index(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile(
      "mov %%rax, %%r12\n\t"
      "mov %%rcx, %%r13\n\t"
      "tileloadd (%%r12,%%r13,8), %%tmm1" ::"a"(p),
      "c"(s / 8)
      : "memory", "r12", "r13");
}
void r13_base_r12_index(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile(
      "mov %%rax, %%r13\n\t"
      "mov %%rcx, %%r12\n\t"
      "tileloadd (%%r13,%%r12,1), %%tmm1" ::"a"(p),
      "c"(s)
      : "memory", "r12", "r13");
}
void r8_base_r15_index(const uint8_t* p, ptrdiff_t s) {
  __asm__ volatile(
      "mov %%rax, %%r8\n\t"
      "mov %%rcx, %%r15\n\t"
      "tileloaddt1 127(%%r8,%%r15,1), %%tmm1" ::"a"(p - 127),
      "c"(s)
      : "memory", "r8", "r15");
}

TEST(addresses_of_loads) {
  Pattern pattern;
  for (const Load load : {plain, short_displacement, long_displacement, rbp_base, rsp_base,
                          r12_base_r13_index, r13_base_r12_index, r8_base_r15_index}) {
    for (const ptrdiff_t stride : {64, 8, 1016, -1016, 0}) {
      if (load == rsp_base && stride < 0) continue;  // the rows would be where the signal's frame goes
      ldtilecfg(TileConfig().tile(1, 16, 64));
      load(pattern.middle(), stride);
      CHECK_FOR(tile1_holds(pattern.middle(), stride, 16, 64), "stride " + std::to_string(stride));
    }
  }
}

TEST(address_without_index_has_stride_0) {
  const Pattern pattern;
  ldtilecfg(TileConfig().tile(1, 5, 20));
  __asm__ volatile("tileloadd 3(%0), %%tmm1" ::"r"(pattern.middle()) : "memory");
  CHECK(tile1_holds(pattern.middle() + 3, 0, 5, 20));
}

TEST(address_without_base) {
  constexpr uintptr_t kPlace = 0x10000000;
  void* memory = mmap(reinterpret_cast<void*>(kPlace), 4096, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  CHECK(memory == reinterpret_cast<void*>(kPlace));
  if (memory != reinterpret_cast<void*>(kPlace)) return;
  const Pattern pattern;
  std::memcpy(memory, pattern.bytes.data(), 4096);
  ldtilecfg(TileConfig().tile(1, 16, 64));
  __asm__ volatile("tileloadd 0x10000040(,%0,2), %%tmm1" ::"r"(static_cast<ptrdiff_t>(40)) : "memory");
  CHECK(tile1_holds(static_cast<uint8_t*>(memory) + 0x40, 80, 16, 64));
  munmap(memory, 4096);
}

TEST(addresses_of_stores) {
  const Pattern pattern;
  ldtilecfg(TileConfig().tile(6, 3, 12));
  TILELOADD(6, pattern.middle(), 100);
  std::vector<uint8_t> memory(1024, kUntouched);
  uint8_t* const base = memory.data() + 512;
  __asm__ volatile(
      "mov %%rax, %%r13\n\t"
      "mov %%rcx, %%r14\n\t"
      "tilestored %%tmm6, (%%r13,%%r14,2)\n\t"
      "tilestored %%tmm6, 0x100(%%r13,%%r14,1)" ::"a"(base),
      "c"(static_cast<ptrdiff_t>(-32))
      : "memory", "r13", "r14");
  for (int r = 0; r < 3; ++r) {
    for (int c = 0; c < 12; ++c) {
      CHECK(base[-64 * r + c] == pattern.middle()[100 * r + c]);
      CHECK(base[256 - 32 * r + c] == pattern.middle()[100 * r + c]);
      base[-64 * r + c] = base[256 - 32 * r + c] = kUntouched;
    }
  }
  for (const uint8_t byte : memory) CHECK(byte == kUntouched);
}

// ---- shapes ----

TEST(every_shape_and_no_byte_beyond_it) {
  // The last byte of the tile is the last byte before a page that cannot be read.
  const long page = sysconf(_SC_PAGESIZE);
  auto* const memory = static_cast<uint8_t*>(
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(mprotect(memory + page, page, PROT_NONE) == 0);
  const Pattern pattern;
  std::memcpy(memory, pattern.bytes.data(), page);
  for (int rows = 1; rows <= 16; ++rows) {
    for (int row_bytes = 4; row_bytes <= 64; row_bytes += 4) {
      ldtilecfg(TileConfig().tile(1, rows, row_bytes));
      const ptrdiff_t stride = row_bytes + 3;
      uint8_t* const base = memory + page - (rows - 1) * stride - row_bytes;
      TILELOADD(1, base, stride);
      CHECK_FOR(tile1_holds(base, stride, rows, row_bytes),
                std::to_string(rows) + "x" + std::to_string(row_bytes));
      TILESTORED(1, base, stride);
    }
  }
  CHECK(std::memcmp(memory, pattern.bytes.data(), page) == 0);
  munmap(memory, 2 * page);
}

const uint8_t kZeros[1024] = {};

#define CHECK_TILE(number)                                                            \
  do {                                                                                \
    Stored stored;                                                                    \
    TILELOADD(number, pattern.bytes.data() + 1000 * number, 64);                      \
    TILESTORED(number, stored.rows, 64);                                              \
    CHECK(std::memcmp(stored.rows, pattern.bytes.data() + 1000 * number, 1024) == 0); \
    TILEZERO(number);                                                                 \
    TILESTORED(number, stored.rows, 64);                                              \
    CHECK(std::memcmp(stored.rows, kZeros, 1024) == 0);                               \
    TILELOADD(number, pattern.bytes.data() + 1000 * number, 64);                      \
  } while (false)

#define CHECK_STILL_THERE(number)                                                     \
  do {                                                                                \
    Stored stored;                                                                    \
    TILESTORED(number, stored.rows, 64);                                              \
    CHECK(std::memcmp(stored.rows, pattern.bytes.data() + 1000 * number, 1024) == 0); \
  } while (false)

TEST(eight_tiles) {
  const Pattern pattern;
  ldtilecfg(TileConfig().all(16, 64));
  CHECK_TILE(0);
  CHECK_TILE(1);
  CHECK_TILE(2);
  CHECK_TILE(3);
  CHECK_TILE(4);
  CHECK_TILE(5);
  CHECK_TILE(6);
  CHECK_TILE(7);
  CHECK_STILL_THERE(0);
  CHECK_STILL_THERE(3);
  CHECK_STILL_THERE(7);
}

// ---- configuration ----

extern "C" const TileConfig amx_test_config __attribute__((visibility("hidden"))) =
    TileConfig().tile(1, 7, 28).tile(5, 16, 4);

TEST(configuration_is_kept_and_released) {
  TileConfig seen;
  __asm__ volatile("ldtilecfg amx_test_config(%%rip)" ::: "memory");
  sttilecfg(seen);
  CHECK(std::memcmp(&seen, &amx_test_config, 64) == 0);

  // This is not an address of a tile: the index is added.
  TileConfig configs[3];
  configs[2] = TileConfig().tile(0, 1, 8);
  __asm__ volatile("ldtilecfg 64(%0,%1,8)" ::"r"(configs), "r"(static_cast<ptrdiff_t>(8)) : "memory");
  sttilecfg(seen);
  CHECK(std::memcmp(&seen, &configs[2], 64) == 0);

  const TileConfig nothing = [] {
    TileConfig config;
    config.palette = 0;
    return config;
  }();
  tilerelease();
  sttilecfg(seen);
  CHECK(std::memcmp(&seen, &nothing, 64) == 0);
  ldtilecfg(configs[2]);
  ldtilecfg(nothing);
  sttilecfg(seen);
  CHECK(std::memcmp(&seen, &nothing, 64) == 0);
}

TEST(configuring_zeroes_tiles) {
  const Pattern pattern;
  ldtilecfg(TileConfig().all(16, 64));
  TILELOADD(1, pattern.middle(), 64);
  ldtilecfg(TileConfig().all(16, 64));
  CHECK(tile1_holds(kZeros, 64, 16, 64));
}

TEST(start_row_resumes_a_load) {
  const Pattern pattern;
  TileConfig config = TileConfig().tile(1, 6, 32);
  config.start_row = 4;
  ldtilecfg(config);
  TILELOADD(1, pattern.middle(), 50);
  TileConfig seen;
  sttilecfg(seen);
  CHECK(seen.start_row == 0);
  Stored stored;
  TILESTORED(1, stored.rows, 64);
  for (int c = 0; c < 32; ++c) {
    CHECK(stored.rows[3][c] == 0);
    CHECK(stored.rows[4][c] == pattern.middle()[4 * 50 + c]);
    CHECK(stored.rows[5][c] == pattern.middle()[5 * 50 + c]);
  }
}

// ---- faults ----

const std::string kAborted = "signal " + std::to_string(SIGABRT) + ": amx_emulator: ";

void expect_abort(void (*body)(), const char* instruction, const char* reason) {
  const std::string text = in_a_child(body);
  if (native_amx()) {
    // The processor faults as well, without further explanation.
    CHECK_FOR(text.compare(0, 7, "signal ") == 0, std::string(reason) + ", got " + text);
    return;
  }
  const bool right = text.compare(0, kAborted.size(), kAborted) == 0 &&
                     text.find(instruction) != std::string::npos && text.find(reason) != std::string::npos;
  CHECK_FOR(right, std::string(reason) + ", got " + text);
}

void load_config_with(int offset, uint8_t value) {
  TileConfig config = TileConfig().all(16, 64);
  reinterpret_cast<uint8_t*>(&config)[offset] = value;
  ldtilecfg(config);
}

TEST(faults_of_the_configuration) {
  expect_abort([] { load_config_with(0, 2); }, "ldtilecfg", "#GP: the only palettes");
  expect_abort([] { load_config_with(2, 1); }, "ldtilecfg", "#GP: reserved");
  expect_abort([] { load_config_with(15, 1); }, "ldtilecfg", "#GP: reserved");
  expect_abort([] { load_config_with(47, 1); }, "ldtilecfg", "#GP: reserved");
  expect_abort([] { load_config_with(63, 1); }, "ldtilecfg", "#GP: reserved");
  expect_abort([] { load_config_with(16, 65); }, "ldtilecfg", "#GP: a tile with more than 64 bytes");
  expect_abort([] { load_config_with(31, 1); }, "ldtilecfg", "#GP: a tile with more than 64 bytes");
  expect_abort([] { load_config_with(55, 17); }, "ldtilecfg", "#GP: a tile with more than 16 rows");
  expect_abort([] { load_config_with(48, 0); }, "ldtilecfg", "#GP: a tile with rows but no columns");
  expect_abort([] { load_config_with(16, 0); }, "ldtilecfg", "#GP: a tile with rows but no columns");
}

uint8_t somewhere[1024];

TEST(faults_of_tiles) {
  expect_abort(
      [] {
        tilerelease();
        TILEZERO(0);
      },
      "tilezero", "#UD: no tile is configured");
  expect_abort(
      [] {
        ldtilecfg(TileConfig().tile(0, 1, 4));
        TILELOADD(1, somewhere, 64);
      },
      "tileloadd", "#UD: this tile is not in the configuration");
  expect_abort(
      [] {
        ldtilecfg(TileConfig().tile(1, 1, 6));
        TILESTORED(1, somewhere, 64);
      },
      "tilestored", "#UD: the rows of this tile are not a multiple");
  expect_abort(
      [] {
        load_config_with(1, 16);
        TILELOADD(1, somewhere, 64);
      },
      "tileloadd", "#UD: start_row");
}

void multiply(int rows0, int bytes0, int rows1, int bytes1, int rows2, int bytes2) {
  ldtilecfg(TileConfig().tile(0, rows0, bytes0).tile(1, rows1, bytes1).tile(2, rows2, bytes2));
  TDPBF16PS(0, 1, 2);
}

TEST(faults_of_products) {
  CHECK(in_a_child([] { multiply(3, 8, 3, 20, 5, 8); }) == "exit 0: ");
  expect_abort([] { multiply(4, 8, 3, 20, 5, 8); }, "tdpbf16ps", "not the rows of the first source");
  expect_abort([] { multiply(3, 12, 3, 20, 5, 8); }, "tdpbf16ps", "not the columns of the second source");
  expect_abort([] { multiply(3, 8, 3, 20, 6, 8); }, "tdpbf16ps", "are not the rows of the second");
  expect_abort([] { multiply(3, 8, 3, 22, 5, 8); }, "tdpbf16ps", "not a multiple of four bytes");
  expect_abort([] { multiply(3, 8, 3, 20, 0, 0); }, "tdpbf16ps", "not in the configuration");
  expect_abort(
      [] {
        ldtilecfg(TileConfig().all(16, 64));
        __asm__ volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1");  // tmm0, tmm1, tmm1
      },
      "tdpbf16ps", "must differ");
  expect_abort(
      [] {
        ldtilecfg(TileConfig().all(16, 64));
        __asm__ volatile(".byte 0xc4, 0xe2, 0x7a, 0x5c, 0xc1");  // tmm0, tmm1, tmm0
      },
      "tdpbf16ps", "must differ");
  // These are the bytes of TDPBSSD, from AMX-INT8.
  expect_abort([] { __asm__ volatile(".byte 0xc4, 0xe2, 0x63, 0x5e, 0xca"); }, "",
               "AMX-INT8 is not emulated");
  // These are the bytes of TILELOADD (%rax) without a SIB byte.
  expect_abort([] { __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, 0x08"); }, "", "need a SIB byte");
}

#if defined(__SANITIZE_ADDRESS__)
TEST(address_sanitizer_sees_tile_loads) {
  const std::string text = in_a_child([] {
    const std::vector<uint8_t> heap(1023);
    ldtilecfg(TileConfig().tile(1, 16, 64));
    TILELOADD(1, heap.data(), 64);
  });
  CHECK_FOR(text.find("heap-buffer-overflow") != std::string::npos, text);
}
#endif

}  // namespace

#endif
