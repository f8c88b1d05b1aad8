#if defined(SELFATTN_EMULATOR_RACES)

#include "races.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <unordered_map>

#include "places.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator::races {

namespace {

// Thread t is agent 2 t, its engine for copies agent 2 t + 1.
int agent_of(int thread) { return 2 * thread; }
int engine_of(int thread) { return 2 * thread + 1; }

// How much of each agent has happened before, by agent.
using Clock = std::vector<uint32_t>;

struct Access {
  uint32_t block = 0;  // 0: there was none
  uint32_t agent = 0;
  uint32_t time = 0;
  uint32_t place = 0;
};

// What is known of one byte of memory.
struct Byte {
  Access write;
  std::vector<Access> reads;  // since the write, at least those that nothing orders
};

constexpr size_t kPageBytes = 256;
using Page = std::array<Byte, kPageBytes>;

std::vector<Clock> clocks;         // by thread
std::vector<uint32_t> copy_times;  // by thread: how many copies it has begun
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uint32_t block_number = 0;

// The page that was asked for last, which is often the next one, too.
uintptr_t last_number = 0;
Page* last_page = nullptr;

Byte& byte_at(uintptr_t address) {
  const uintptr_t number = address / kPageBytes;
  if (last_page == nullptr || number != last_number) {
    std::unique_ptr<Page>& page = pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    last_number = number;
    last_page = page.get();
  }
  return (*last_page)[address % kPageBytes];
}

bool happened_before(const Access& earlier, const Clock& clock) {
  return earlier.block == 0 || (earlier.block == block_number && clock[earlier.agent] >= earlier.time);
}

std::string text_of_agent(const Access& access) {
  const int thread = static_cast<int>(access.agent) / 2;
  return std::string(access.agent % 2 == 1 ? "an asynchronous copy of " : "") + "thread " +
         std::to_string(thread) + " (warp " + std::to_string(thread / kWarpSize) + ", lane " +
         std::to_string(thread % kWarpSize) + ")" + (access.block == block_number ? "" : " of another block");
}

[[noreturn]] void report(uintptr_t address, const Access& earlier, const char* did, const Access& later,
                         const char* does) {
  const void* pointer = reinterpret_cast<const void*>(address);
  const bool shared = shared_memory().is_near(pointer);
  const std::string where =
      shared ? "byte " + std::to_string(static_cast<const unsigned char*>(pointer) - shared_memory().data()) +
                   " of shared memory"
             : "global memory";
  fail("race on " + where + " in block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) +
       ", " + std::to_string(blockIdx.z) + "): " + text_of_agent(later) + " " + does + " it in " +
       text_of_place(later.place) + ", and nothing orders this after " + text_of_agent(earlier) + ", which " +
       did + " it in " + text_of_place(earlier.place));
}

void check_bounds(const void* address, int bytes, uint32_t place) {
  const SharedMemory& memory = shared_memory();
  if (!memory.is_near(address) || memory.holds(address, static_cast<size_t>(bytes))) return;
  fail(whereabouts() + " accesses the byte " +
       std::to_string(static_cast<const unsigned char*>(address) - memory.data()) + " of " +
       std::to_string(memory.bytes()) + " bytes of shared memory in " + text_of_place(place));
}

// Makes room for a read by forgetting those that it comes after: what comes after it comes after them, too.
// Not at every read, as many threads read the same bytes.
void make_room(std::vector<Access>& reads, const Clock& clock) {
  if (reads.size() < reads.capacity()) return;
  bool other_block = false;
  const auto needless = [&](const Access& read) {
    // Of the reads in other blocks one is enough: a write here or there races with it.
    const bool elsewhere = read.block != block_number;
    if (elsewhere ? other_block : happened_before(read, clock)) return true;
    other_block |= elsewhere;
    return false;
  };
  reads.erase(std::remove_if(reads.begin(), reads.end(), std::ref(needless)), reads.end());
  if (2 * reads.size() > reads.capacity()) reads.reserve(2 * reads.capacity());
}

// `access` is of the running thread or of its engine, which begins with what the thread knows.
void record_read(const void* address, int bytes, const Access& access) {
  const Clock& clock = clocks[static_cast<size_t>(self().number)];
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t at = first; at < first + static_cast<uintptr_t>(bytes); ++at) {
    Byte& byte = byte_at(at);
    if (!happened_before(byte.write, clock)) report(at, byte.write, "wrote", access, "reads");
    make_room(byte.reads, clock);
    byte.reads.push_back(access);
  }
}

void record_write(const void* address, int bytes, const Access& access) {
  const Clock& clock = clocks[static_cast<size_t>(self().number)];
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t at = first; at < first + static_cast<uintptr_t>(bytes); ++at) {
    Byte& byte = byte_at(at);
    if (!happened_before(byte.write, clock)) report(at, byte.write, "wrote", access, "writes");
    for (const Access& read : byte.reads) {
      if (!happened_before(read, clock)) report(at, read, "reads", access, "writes");
    }
    byte.reads.clear();
    byte.write = access;
  }
}

Access access_of_thread(uint32_t place) {
  const int thread = self().number;
  const auto agent = static_cast<uint32_t>(agent_of(thread));
  return {block_number, agent, clocks[static_cast<size_t>(thread)][agent], place};
}

bool is_private(const void* address) {
  if (self().fiber.holds(address)) return true;
  // What the scheduler writes at every switch is a register in a GPU.
  return (address >= &threadIdx && address < &threadIdx + 1) ||
         (address >= &blockIdx && address < &blockIdx + 1);
}

}  // namespace

void start_grid() {
  pages.clear();
  last_page = nullptr;
}

void start_block(int threads) {
  ++block_number;
  const auto count = static_cast<size_t>(threads);
  clocks.assign(count, Clock(2 * count, 0));
  // Nothing has happened at time 0, so that the clocks of others do not include what a thread does first.
  for (int thread = 0; thread < threads; ++thread) {
    clocks[static_cast<size_t>(thread)][static_cast<size_t>(agent_of(thread))] = 1;
  }
  copy_times.assign(count, 0);
  const auto first = reinterpret_cast<uintptr_t>(shared_memory().data()) / kPageBytes;
  const size_t shared_pages = shared_memory().bytes() / kPageBytes + 2;
  for (size_t n = 0; n < shared_pages; ++n) pages.erase(first + n);
  last_page = nullptr;
}

void synchronise(const std::vector<int>& threads) {
  Clock joined(clocks.empty() ? 0 : clocks[0].size(), 0);
  for (const int thread : threads) {
    const Clock& clock = clocks[static_cast<size_t>(thread)];
    for (size_t n = 0; n < joined.size(); ++n) joined[n] = std::max(joined[n], clock[n]);
  }
  for (const int thread : threads) {
    Clock& clock = clocks[static_cast<size_t>(thread)];
    clock = joined;
    ++clock[static_cast<size_t>(agent_of(thread))];
  }
}

void read(const void* address, int bytes, const Site& site) {
  record_read(address, bytes, access_of_thread(number_of_place(site)));
}

void read(const void* address, int bytes, const void* program_counter) {
  if (is_private(address)) return;
  const uint32_t place = number_of_place(program_counter);
  check_bounds(address, bytes, place);
  record_read(address, bytes, access_of_thread(place));
}

void write(const void* address, int bytes, const void* program_counter) {
  if (is_private(address)) return;
  const uint32_t place = number_of_place(program_counter);
  check_bounds(address, bytes, place);
  record_write(address, bytes, access_of_thread(place));
}

int64_t begin_copy(const void* destination, const void* source, int bytes, const Site& site) {
  const int thread = self().number;
  const uint32_t time = ++copy_times[static_cast<size_t>(thread)];
  const Access access{block_number, static_cast<uint32_t>(engine_of(thread)), time, number_of_place(site)};
  if (source != nullptr) record_read(source, bytes, access);
  record_write(destination, bytes, access);
  return time;
}

void copies_arrived(int64_t last) {
  const int thread = self().number;
  uint32_t& known = clocks[static_cast<size_t>(thread)][static_cast<size_t>(engine_of(thread))];
  known = std::max(known, static_cast<uint32_t>(last));
}

}  // namespace selfattn::emulator::races

#endif
