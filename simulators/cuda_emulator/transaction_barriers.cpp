#include "transaction_barriers.h"

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "box_copies.h"
#include "races.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator::barriers {

namespace {

constexpr int kBarrierBytes = 8;
constexpr int kMostArrivals = (1 << 20) - 1;
constexpr int kMostBytes = (1 << 20) - 1;

struct TransactionBarrier {
  int arrivals = 0;   // arrivals that each phase needs
  int pending = 0;    // arrivals that this phase still needs
  int64_t bytes = 0;  // announced and not there yet; negative if they came first
  uint64_t phase = 0;
  int number = 0;           // in the order of initialisation
  int initialiser = 0;      // the thread that initialised it
  bool is_fenced = false;   // whether the asynchronous proxy knows it
  int copies = 0;           // copies on their way
  bool had_copies = false;  // whether this phase had copies
  bool unwaited = false;    // whether the last phase that ended had copies and nobody waited
  Site copy_site;           // where the latest copy was begun
  races::Order arrived;     // what this phase makes known
  races::Order ended;       // what the last one has made known
  std::vector<Thread*> waiting;
};

std::map<void*, TransactionBarrier> barriers;

std::string name_of(const void* barrier) {
  return "the barrier at byte " +
         std::to_string(static_cast<const unsigned char*>(barrier) - shared_memory().data()) +
         " of shared memory";
}

// Returns the word that a barrier's memory holds here, so that writes over a barrier are noticed.
uint64_t mark_of(const void* barrier) {
  return uint64_t{0x6d62617272696572} ^ reinterpret_cast<uintptr_t>(barrier);
}

TransactionBarrier& barrier_at(void* barrier, const Site& site) {
  check_shared(barrier, kBarrierBytes, site);
  const auto found = barriers.find(barrier);
  if (found == barriers.end()) {
    fail(whereabouts() + " uses " + name_of(barrier) + " in " + to_string(site) +
         ", which has not been initialised");
  }
  uint64_t mark;
  std::memcpy(&mark, barrier, sizeof(mark));
  if (mark != mark_of(barrier)) {
    fail(whereabouts() + " uses " + name_of(barrier) + " in " + to_string(site) +
         ", over which something has been written");
  }
  races::read(barrier, kBarrierBytes, site);
  return found->second;
}

// Ends the phase if nothing is missing.
void end_phase(void* address, TransactionBarrier& barrier) {
  if (barrier.pending > 0) return;
  if (barrier.bytes < 0) {
    fail(name_of(address) + " has got " + std::to_string(-barrier.bytes) +
         " bytes more than its phase had announced when the last of " + std::to_string(barrier.arrivals) +
         " threads had arrived (" + to_string(barrier.copy_site) + ")");
  }
  if (barrier.bytes > 0) return;
  if (barrier.copies > 0) {
    fail("a phase of " + name_of(address) + " ends before a copy (" + to_string(barrier.copy_site) +
         ") that was begun in it, and whose bytes nobody announced");
  }
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  barrier.ended = std::exchange(barrier.arrived, races::Order());
  barrier.unwaited = std::exchange(barrier.had_copies, false);
  for (Thread* thread : std::exchange(barrier.waiting, {})) wake(*thread);
}

// Brings copies as late as they may be: when a thread waits, and only their bytes are missing.
void bring_copies(void* address, const TransactionBarrier& barrier) {
  if (!barrier.waiting.empty() && barrier.pending == 0) boxes::complete_for(address);
}

void arrive_at(void* address, TransactionBarrier& barrier, const Site& site) {
  if (barrier.pending == 0) {
    fail(whereabouts() + " arrives at " + name_of(address) + " in " + to_string(site) + ", at which all " +
         std::to_string(barrier.arrivals) + " threads of this phase have arrived");
  }
  races::release(barrier.arrived, self().number);
  --barrier.pending;
  end_phase(address, barrier);
  bring_copies(address, barrier);
}

}  // namespace

void start_block() { barriers.clear(); }

void end_block() {
  for (const auto& [address, barrier] : barriers) {
    if (barrier.copies == 0 && !barrier.unwaited && !barrier.had_copies) continue;
    fail("in block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
         std::to_string(blockIdx.z) + ") all threads have ended, and nobody has waited for the copy of " +
         to_string(barrier.copy_site) + " to " + name_of(address));
  }
}

void init(void* address, int arrivals, const Site& site) {
  check_shared(address, kBarrierBytes, site);
  if (arrivals < 1 || arrivals > kMostArrivals) {
    fail(whereabouts() + " calls " + to_string(site) + " with " + std::to_string(arrivals) + " arrivals");
  }
  if (barriers.count(address) != 0) {
    fail(whereabouts() + " initialises " + name_of(address) + " in " + to_string(site) +
         ", which is initialised");
  }
  races::write(address, kBarrierBytes, site);
  const uint64_t mark = mark_of(address);
  std::memcpy(address, &mark, sizeof(mark));
  const auto number = static_cast<int>(barriers.size());
  TransactionBarrier& barrier = barriers[address];
  barrier.number = number;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.initialiser = self().number;
}

void init_fence() {
  for (auto& [address, barrier] : barriers) {
    if (barrier.initialiser == self().number) barrier.is_fenced = true;
  }
}

void arrive(void* address, const Site& site) { arrive_at(address, barrier_at(address, site), site); }

void arrive_expecting(void* address, int bytes, const Site& site) {
  TransactionBarrier& barrier = barrier_at(address, site);
  if (bytes < 0 || bytes > kMostBytes || barrier.bytes + bytes > kMostBytes) {
    fail(whereabouts() + " announces " + std::to_string(bytes) + " bytes in " + to_string(site) +
         ", more than a barrier can count");
  }
  barrier.bytes += bytes;
  arrive_at(address, barrier, site);
}

void wait(void* address, uint32_t parity, const Site& site) {
  TransactionBarrier& barrier = barrier_at(address, site);
  if (parity > 1) {
    fail(whereabouts() + " calls " + to_string(site) + " with the parity " + std::to_string(parity));
  }
  // A device asks again and again, and so does this loop: a thread that is woken looks whether the phase is
  // still the one after its own, because another phase may have ended meanwhile.
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(&self());
    bring_copies(address, barrier);  // this may wake this thread before it waits
    emulator::wait(site);
  }
  barrier.unwaited = false;
  races::acquire(barrier.ended, self().number);
}

int begin_copy(void* address, const Site& site) {
  TransactionBarrier& barrier = barrier_at(address, site);
  if (!barrier.is_fenced) {
    fail(whereabouts() + " copies to " + name_of(address) + " in " + to_string(site) +
         ", which the thread that initialised it has not made known by barrier_init_fence()");
  }
  ++barrier.copies;
  barrier.had_copies = true;
  barrier.copy_site = site;
  return barrier.number;
}

void finish_copy(void* address, int bytes, const races::Box& box) {
  TransactionBarrier& barrier = barriers.at(address);
  races::release_box(barrier.arrived, box);
  --barrier.copies;
  barrier.bytes -= bytes;
  end_phase(address, barrier);
}

void copy_is_on_its_way(void* address) { bring_copies(address, barriers.at(address)); }

bool lacks_bytes(void* address) {
  const TransactionBarrier& barrier = barriers.at(address);
  return barrier.pending == 0 && barrier.bytes > 0;
}

std::string what_barriers_lack() {
  std::string text;
  for (const auto& [address, barrier] : barriers) {
    if (barrier.waiting.empty()) continue;
    text += "\n  " + name_of(address) + " is in phase " + std::to_string(barrier.phase) + ", which lacks " +
            std::to_string(barrier.pending) + " of " + std::to_string(barrier.arrivals) + " arrivals and " +
            std::to_string(barrier.bytes) + " bytes; " + std::to_string(barrier.copies) +
            " copies are on their way";
  }
  return text;
}

}  // namespace selfattn::emulator::barriers
