#include "ptx_sm90_model.h"

#include <string>

#include "box_copies.h"
#include "named_barriers.h"
#include "options.h"
#include "races.h"
#include "register_pool.h"
#include "scheduler.h"
#include "transaction_barriers.h"

namespace selfattn::emulator {

void require_hopper(const Site& site) {
  if (options().capability == 90) return;
  fail(whereabouts() + " calls " + to_string(site) + ", which traps on a device of compute capability " +
       std::to_string(options().capability));
}

void barrier_init(uint64_t* barrier, int arrivals, const Site& site) {
  require_hopper(site);
  barriers::init(barrier, arrivals, site);
}

void barrier_init_fence(const Site& site) {
  require_hopper(site);
  barriers::init_fence();
}

void barrier_arrive(uint64_t* barrier, const Site& site) {
  require_hopper(site);
  barriers::arrive(barrier, site);
}

void barrier_arrive_expecting(uint64_t* barrier, int bytes, const Site& site) {
  require_hopper(site);
  barriers::arrive_expecting(barrier, bytes, site);
}

void barrier_wait(uint64_t* barrier, uint32_t parity, const Site& site) {
  require_hopper(site);
  barriers::wait(barrier, parity, site);
}

void copy_box_async(void* shared, const void* map, uint64_t* barrier, int column, int row, int second,
                    int third, const Site& site) {
  require_hopper(site);
  boxes::copy(shared, map, barrier, {column, row, second, third}, site);
}

void fence_async_proxy(const Site& site) {
  require_hopper(site);
  races::fence_async_proxy();
}

void come_to_barrier(int number, int threads, bool waits, const Site& site) {
  require_hopper(site);
  named::come(number, threads, waits, site);
}

void set_registers(int count, bool takes, const Site& site) {
  require_hopper(site);
  registers::set(count, takes, site);
}

}  // namespace selfattn::emulator
