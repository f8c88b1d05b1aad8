#if defined(SELFATTN_EMULATOR_RACES)

#include "races.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <unordered_map>

#include "options.h"
#include "places.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator::races {

namespace {

// Parts of a thread's clock: what the thread does itself, and its copies of 16 bytes. The last two parts say
// how much of the first two the asynchronous proxy will know, because it does not see a store that no fence
// follows.
enum Part { kThread, kCopies, kKnownStores, kKnownCopies };

// The number of parts of a thread. Devices without an asynchronous proxy need only two of them.
uint32_t parts = 0;
uint32_t threads_of_block = 0;

uint32_t agent_of(int thread, Part part) { return static_cast<uint32_t>(thread) * parts + part; }
// The agents after the threads are the warpgroups, for their products.
uint32_t agent_of_group(int group) { return threads_of_block * parts + static_cast<uint32_t>(group); }
uint32_t groups_of_block() { return threads_of_block / 128; }
// The agents after the warpgroups are barriers, for the copies of boxes that they count, because copies that
// different barriers count arrive in any order. If there are more barriers than agents, barriers share
// agents, which may hide a race.
constexpr uint32_t kBarriers = 64;
uint32_t agent_of_barrier(int barrier) {
  return agent_of_group(static_cast<int>(groups_of_block())) + static_cast<uint32_t>(barrier) % kBarriers;
}
bool is_of_thread(uint32_t agent) { return agent < threads_of_block * parts; }
bool is_of_group(uint32_t agent) { return !is_of_thread(agent) && agent < agent_of_barrier(0); }

// For each agent, how much of what it did has happened before.
using Clock = std::vector<uint32_t>;

struct Access {
  uint32_t block = 0;  // 0 if there was no access
  uint32_t agent = 0;
  uint32_t time = 0;
  uint32_t place = 0;
};

// A place with this bit set belongs to an atomic operation.
constexpr uint32_t kAtomic = 1u << 31;

// The accesses to one byte of memory that are known.
struct Byte {
  Access write;
  std::vector<Access> reads;  // since the write; at least those that are not ordered
};

constexpr size_t kPageBytes = 256;
using Page = std::array<Byte, kPageBytes>;

std::vector<Clock> clocks;         // by thread
std::vector<uint32_t> copy_times;  // by thread: how many copies it has begun
// For each barrier's agent, the threads that have begun the boxes that it counts.
std::array<std::vector<int>, kBarriers> boxes;
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uint32_t block_number = 0;

// The page that was asked for last, because the next access is often on the same page.
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

// Returns whether a store happened before what the asynchronous proxy does for an agent with this clock.
bool is_known(const Access& store, const Clock& clock) {
  if (store.block == block_number && is_of_thread(store.agent)) {
    const uint32_t part = store.agent % parts;
    if (part == kThread) return clock[store.agent + kKnownStores - kThread] >= store.time;
    if (part == kCopies) return clock[store.agent + kKnownCopies - kCopies] >= store.time;
  }
  return happened_before(store, clock);
}

std::string text_of_agent(const Access& access) {
  const std::string where = access.block == block_number ? "" : " of another block";
  if (is_of_group(access.agent))
    return "a product of warpgroup " + std::to_string(access.agent - threads_of_block * parts) + where;
  const bool is_thread = is_of_thread(access.agent);
  if (!is_thread && access.block != block_number) return "an asynchronous copy" + where;
  const int thread = is_thread ? static_cast<int>(access.agent / parts)
                               : boxes[access.agent - agent_of_barrier(0)][access.time - 1];
  const bool copies = !is_thread || access.agent % parts != kThread;
  return std::string(copies ? "an asynchronous copy of " : "") + "thread " + std::to_string(thread) +
         " (warp " + std::to_string(thread / kWarpSize) + ", lane " + std::to_string(thread % kWarpSize) +
         ")" + where;
}

[[noreturn]] void report(uintptr_t address, const Access& earlier, const char* did, const Access& later,
                         const char* does, const char* lacks = "nothing orders this after ") {
  const void* pointer = reinterpret_cast<const void*>(address);
  const bool shared = shared_memory().is_near(pointer);
  const std::string where =
      shared ? "byte " + std::to_string(static_cast<const unsigned char*>(pointer) - shared_memory().data()) +
                   " of shared memory"
             : "global memory";
  fail("race on " + where + " in block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) +
       ", " + std::to_string(blockIdx.z) + "): " + text_of_agent(later) + " " + does + " it in " +
       text_of_place(later.place & ~kAtomic) + ", and " + lacks + text_of_agent(earlier) + ", which " + did +
       " it in " + text_of_place(earlier.place & ~kAtomic));
}

void check_bounds(const void* address, int bytes, uint32_t place) {
  const SharedMemory& memory = shared_memory();
  if (!memory.is_near(address) || memory.holds(address, static_cast<size_t>(bytes))) return;
  fail(whereabouts() + " accesses the byte " +
       std::to_string(static_cast<const unsigned char*>(address) - memory.data()) + " of " +
       std::to_string(memory.bytes()) + " bytes of shared memory in " + text_of_place(place));
}

// Makes room for a read by forgetting earlier reads that it comes after: an access that comes after it comes
// after them, too. This is not done at every read, because many threads read the same bytes.
void make_room(std::vector<Access>& reads, const Clock& clock) {
  if (reads.size() < reads.capacity()) return;
  bool other_block = false;
  const auto needless = [&](const Access& read) {
    // One read in another block is enough, because any write here or there races with it.
    const bool elsewhere = read.block != block_number;
    if (elsewhere ? other_block : happened_before(read, clock)) return true;
    other_block |= elsewhere;
    return false;
  };
  reads.erase(std::remove_if(reads.begin(), reads.end(), std::ref(needless)), reads.end());
  if (2 * reads.size() > reads.capacity()) reads.reserve(2 * reads.capacity());
}

// Records a read by an agent that knows `clock`; `proxy` says that it goes through the asynchronous proxy.
void record_read(const void* address, int bytes, const Access& access, const Clock& clock,
                 bool proxy = false) {
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t at = first; at < first + static_cast<uintptr_t>(bytes); ++at) {
    Byte& byte = byte_at(at);
    if (!happened_before(byte.write, clock)) report(at, byte.write, "wrote", access, "reads");
    if (proxy && !is_known(byte.write, clock))
      report(at, byte.write, "wrote", access, "reads", "no fence_async_proxy() follows ");
    make_room(byte.reads, clock);
    byte.reads.push_back(access);
  }
}

void record_write(const void* address, int bytes, const Access& access, const Clock& clock,
                  bool proxy = false) {
  const bool is_atomic = (access.place & kAtomic) != 0;
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t at = first; at < first + static_cast<uintptr_t>(bytes); ++at) {
    Byte& byte = byte_at(at);
    const bool both_atomic = is_atomic && (byte.write.place & kAtomic) != 0;
    if (!both_atomic && !happened_before(byte.write, clock))
      report(at, byte.write, "wrote", access, "writes");
    if (proxy && !is_known(byte.write, clock))
      report(at, byte.write, "wrote", access, "writes", "no fence_async_proxy() follows ");
    for (const Access& read : byte.reads) {
      if (!happened_before(read, clock)) report(at, read, "reads", access, "writes");
    }
    byte.reads.clear();
    byte.write = access;
  }
}

const Clock& clock_of_self() { return clocks[static_cast<size_t>(self().number)]; }

void join(Clock& clock, const Clock& other) {
  if (clock.empty()) clock.resize(other.size(), 0);
  for (size_t n = 0; n < other.size(); ++n) clock[n] = std::max(clock[n], other[n]);
}

// Ends what others know of a thread: what it does from here on is new to them.
void pass_time(int thread) { ++clocks[static_cast<size_t>(thread)][agent_of(thread, kThread)]; }

Access access_of_thread(uint32_t place) {
  const int thread = self().number;
  const uint32_t agent = agent_of(thread, kThread);
  return {block_number, agent, clocks[static_cast<size_t>(thread)][agent], place};
}

bool is_private(const void* address) {
  if (self().fiber.holds(address)) return true;
  // The variables that the scheduler writes at every switch are registers in a GPU.
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
  threads_of_block = static_cast<uint32_t>(threads);
  parts = options().capability == 90 ? kKnownCopies + 1 : kCopies + 1;
  clocks.assign(count, Clock(parts > kKnownCopies ? agent_of_barrier(0) + kBarriers : parts * count, 0));
  // Time begins at 1: at 0 nothing has happened, so the clocks of others do not include a thread's first
  // accesses.
  for (int thread = 0; thread < threads; ++thread) {
    clocks[static_cast<size_t>(thread)][agent_of(thread, kThread)] = 1;
  }
  copy_times.assign(count, 0);
  for (std::vector<int>& begun : boxes) begun.clear();
  const auto first = reinterpret_cast<uintptr_t>(shared_memory().data()) / kPageBytes;
  const size_t shared_pages = shared_memory().bytes() / kPageBytes + 2;
  for (size_t n = 0; n < shared_pages; ++n) pages.erase(first + n);
  last_page = nullptr;
}

void synchronise(const std::vector<int>& threads) {
  Clock joined;
  for (const int thread : threads) join(joined, clocks[static_cast<size_t>(thread)]);
  for (const int thread : threads) {
    clocks[static_cast<size_t>(thread)] = joined;
    pass_time(thread);
  }
}

void read(const void* address, int bytes, const Site& site) {
  record_read(address, bytes, access_of_thread(number_of_place(site)), clock_of_self());
}

void read(const void* address, int bytes, const void* program_counter) {
  if (is_private(address)) return;
  const uint32_t place = number_of_place(program_counter);
  check_bounds(address, bytes, place);
  record_read(address, bytes, access_of_thread(place), clock_of_self());
}

void write(const void* address, int bytes, const Site& site) {
  record_write(address, bytes, access_of_thread(number_of_place(site)), clock_of_self());
}

void write(const void* address, int bytes, const void* program_counter) {
  if (is_private(address)) return;
  const uint32_t place = number_of_place(program_counter);
  check_bounds(address, bytes, place);
  record_write(address, bytes, access_of_thread(place), clock_of_self());
}

void update(const void* address, int bytes, const Site& site) {
  record_write(address, bytes, access_of_thread(number_of_place(site) | kAtomic), clock_of_self());
}

int64_t begin_copy(const void* destination, const void* source, int bytes, const Site& site) {
  const int thread = self().number;
  const uint32_t time = ++copy_times[static_cast<size_t>(thread)];
  const Access access{block_number, agent_of(thread, kCopies), time, number_of_place(site)};
  if (source != nullptr) record_read(source, bytes, access, clock_of_self());
  record_write(destination, bytes, access, clock_of_self());
  return time;
}

void copies_arrived(int64_t last) {
  const int thread = self().number;
  uint32_t& known = clocks[static_cast<size_t>(thread)][agent_of(thread, kCopies)];
  known = std::max(known, static_cast<uint32_t>(last));
}

void release(Order& order, int thread) {
  join(order.clock, clocks[static_cast<size_t>(thread)]);
  pass_time(thread);
}

void acquire(const Order& order, int thread) { join(clocks[static_cast<size_t>(thread)], order.clock); }

void fence_async_proxy() {
  const int thread = self().number;
  Clock& clock = clocks[static_cast<size_t>(thread)];
  clock[agent_of(thread, kKnownStores)] = clock[agent_of(thread, kThread)];
  clock[agent_of(thread, kKnownCopies)] = clock[agent_of(thread, kCopies)];
  pass_time(thread);
}

namespace {

Access access_of_box(const Box& box, const Site& site) {
  return {block_number, agent_of_barrier(box.barrier), box.number, number_of_place(site)};
}

}  // namespace

Box begin_box(int barrier) {
  std::vector<int>& begun = boxes[static_cast<uint32_t>(barrier) % kBarriers];
  begun.push_back(self().number);
  return {barrier, static_cast<uint32_t>(begun.size())};
}

void read_box(const void* address, int bytes, const Box& box, const Site& site) {
  record_read(address, bytes, access_of_box(box, site), clock_of_self(), true);
}

void write_box(const void* address, int bytes, const Box& box, const Site& site) {
  record_write(address, bytes, access_of_box(box, site), clock_of_self(), true);
}

void release_box(Order& order, const Box& box) {
  order.clock.resize(clocks[0].size(), 0);
  uint32_t& known = order.clock[agent_of_barrier(box.barrier)];
  known = std::max(known, box.number);
}

void meet(Order& order, bool first) {
  const Clock& clock = clock_of_self();
  if (first) {
    order.clock = clock;
    return;
  }
  for (size_t n = 0; n < clock.size(); ++n) order.clock[n] = std::min(order.clock[n], clock[n]);
}

void read_product(const void* address, int bytes, const Order& knowledge, int group, int64_t product,
                  const Site& site) {
  const Access access{block_number, agent_of_group(group), static_cast<uint32_t>(product),
                      number_of_place(site)};
  record_read(address, bytes, access, knowledge.clock, true);
}

void products_finished(int group, int64_t last) {
  uint32_t& known = clocks[static_cast<size_t>(self().number)][agent_of_group(group)];
  known = std::max(known, static_cast<uint32_t>(last));
}

}  // namespace selfattn::emulator::races

#endif
