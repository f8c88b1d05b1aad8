#include "group_products.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "options.h"
#include "product_arithmetic.h"
#include "ptx_sm90_model.h"
#include "races.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator::products {

namespace {

constexpr int kGroupWarps = kGroupThreads / kWarpSize;
constexpr size_t kThreads = kGroupThreads;

// The registers that products of a warpgroup add to, from the first product to the wait for the last one.
struct Results {
  int columns = 0;
  std::array<float*, kThreads> registers{};
  std::vector<float> values;  // [thread][columns / 2]
  int products = 0;           // how many products have not been waited for
  bool shown = false;         // whether the registers hold the values, rather than NaN

  int each() const { return columns / 2; }
  float* of(size_t thread) { return values.data() + thread * static_cast<size_t>(each()); }
};

struct Product {
  Form form{};
  bool in_registers = false;  // whether the left operand is in registers
  uint64_t a_matrix = 0;
  uint64_t b_matrix = 0;
  bool adds = false;
  std::shared_ptr<Results> results;
  std::array<std::array<uint32_t, 4>, kThreads> a{};
  std::array<const uint32_t*, kThreads> a_registers{};
  bool is_new = false;  // whether it is the first product of its results
  bool has_happened = false;
  int64_t group = 0;
  Site site;
};

enum class Kind { kProduct, kFence, kCommit, kWait };

// One step of a warpgroup. All of its threads take it, though not at the same time.
struct Step {
  Kind kind{};
  Site site;
  int pending = 0;  // how many groups a wait leaves pending
  int arrived = 0;
  Product product;
  std::vector<Thread*> waiting;
  races::Order knowledge;  // what the threads that have come know, together
};

struct Group {
  std::deque<Step> steps;  // steps that some threads have taken and others not
  int64_t first = 0;       // the number of the first of them
  std::array<int64_t, kThreads> taken{};
  int64_t waits_passed = 0;  // one more than the number of the last wait that all have come to

  std::deque<Product> in_flight;  // products that nothing has waited for yet
  int64_t open_group = 0;         // the number of the group that the next commit closes
  int64_t number = 0;             // how many products there were so far, for the race detector
  int64_t waited = 0;             // how many of them have been waited for

  // The steps, by number, of the last fence and of the waits that handed results back.
  int64_t fenced = -1;
  std::map<const float*, int64_t> handed_back;  // by the results' registers in the group's first thread
};

std::vector<Group> groups;

std::string hexadecimal(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

size_t thread_in_group() { return static_cast<size_t>(self().number % kGroupThreads); }

// Returns the step that this thread takes now.
Step& next_step(int number, Kind kind, int pending, const Site& site) {
  Group& group = groups[static_cast<size_t>(number)];
  const auto place = static_cast<size_t>(group.taken[thread_in_group()]++ - group.first);
  if (place == group.steps.size()) {
    group.steps.emplace_back();
    Step& step = group.steps.back();
    step.kind = kind;
    step.site = site;
    step.pending = pending;
  }
  Step& step = group.steps[place];
  if (step.kind != kind || step.pending != pending) {
    fail("the warpgroup diverges: " + whereabouts() + " comes to " + to_string(site) +
         ", while others of its warpgroup have come to " + to_string(step.site));
  }
  ++step.arrived;
  return step;
}

void compute(Product& product) {
  Results& results = *product.results;
  Operands64 operands;
  if (product.in_registers) {
    operands.take_left(product.a, product.form.bfloat16);
  } else {
    operands.read_left(product.a_matrix, product.form.bfloat16);
  }
  operands.read_right(product.b_matrix, product.form.columns, product.form.bfloat16);
  operands.multiply(results.values.data(), product.adds, product.form.bfloat16);
  product.has_happened = true;
}

// Writes the values, or NaN, to the registers.
void show(Results& results, bool values) {
  const auto bytes = static_cast<size_t>(results.each()) * sizeof(float);
  for (size_t thread = 0; thread < kThreads; ++thread) {
    if (values) {
      std::memcpy(results.registers[thread], results.of(thread), bytes);
    } else {
      std::memset(results.registers[thread], 0xff, bytes);
    }
  }
  results.shown = values;
}

// Fails unless the registers hold what was shown there.
void check_untouched(Results& results, const Product& product) {
  const auto bytes = static_cast<size_t>(results.each()) * sizeof(float);
  const std::vector<unsigned char> nan(bytes, 0xff);
  for (size_t thread = 0; thread < kThreads; ++thread) {
    const void* const expected = results.shown ? static_cast<const void*>(results.of(thread)) : nan.data();
    if (std::memcmp(results.registers[thread], expected, bytes) == 0) continue;
    fail("thread " + std::to_string(thread) + " of the warpgroup of " + whereabouts() +
         " has written to the results of " + to_string(product.site) + " before it waited for them");
  }
}

// Computes the product. `shows` makes its results visible at once, rather than at the wait.
void happen(Product& product, bool shows) {
  Results& results = *product.results;
  check_untouched(results, product);
  compute(product);
  if (shows || results.shown) show(results, true);
}

// Computes the oldest product that has not happened yet.
bool next_happens(Group& group) {
  for (Product& product : group.in_flight) {
    if (product.has_happened) continue;
    happen(product, true);
    return true;
  }
  return false;
}

// Begins a product that all threads have come to.
void begin(Group& group, Step& step) {
  Product& product = step.product;
  if (group.fenced < 0) {
    fail("the warpgroup of " + whereabouts() + " comes to " + to_string(step.site) +
         " without any products_fence() before");
  }
  if (product.is_new) {
    const auto found = group.handed_back.find(product.results->registers[0]);
    if (found != group.handed_back.end() && group.fenced < found->second) {
      fail("the warpgroup of " + whereabouts() + " comes to " + to_string(step.site) +
           " without products_fence() since it waited for earlier results in the same registers");
    }
  }
  ++group.number;
  const Form& form = product.form;
  const auto read = [&](const void* row, int bytes) {
    races::read_product(row, bytes, step.knowledge, self().number / kGroupThreads, group.number, step.site);
  };
  if (!product.in_registers) for_rows(product.a_matrix, kProductRows, form.left_turned, step.site, read);
  for_rows(product.b_matrix, form.columns, form.right_turned, step.site, read);

  product.group = group.open_group;
  product.site = step.site;
  group.in_flight.push_back(std::move(product));
  const Copies when = options().copies;
  if (when == Copies::kEager || (when == Copies::kRandom && random_number() % 4 == 0)) {
    while (next_happens(group)) continue;
  }
}

// Hands back what all groups except the newest `pending` ones have computed.
void finish(Group& group, int64_t step_number, int pending) {
  while (!group.in_flight.empty() && group.in_flight.front().group < group.open_group - pending) {
    Product& product = group.in_flight.front();
    Results& results = *product.results;
    if (product.has_happened) {
      check_untouched(results, product);
    } else {
      happen(product, false);
    }
    ++group.waited;
    if (product.in_registers) {
      for (size_t thread = 0; thread < kThreads; ++thread) {
        if (std::memcmp(product.a_registers[thread], product.a[thread].data(), sizeof(product.a[thread])) ==
            0)
          continue;
        fail("thread " + std::to_string(thread) + " of the warpgroup of " + whereabouts() +
             " has written to the left operand of " + to_string(product.site) + " before it waited");
      }
    }
    if (--results.products == 0) {
      show(results, true);
      group.handed_back[results.registers[0]] = step_number;
    }
    group.in_flight.pop_front();
  }
}

// The last thread that takes a step completes it for all threads.
void complete_steps(Group& group) {
  while (!group.steps.empty() && group.steps.front().arrived == kGroupThreads) {
    Step step = std::move(group.steps.front());
    group.steps.pop_front();
    const int64_t number = group.first++;
    switch (step.kind) {
      case Kind::kProduct:
        begin(group, step);
        break;
      case Kind::kFence:
        group.fenced = number;
        break;
      case Kind::kCommit:
        ++group.open_group;
        break;
      case Kind::kWait:
        finish(group, number, step.pending);
        group.waits_passed = number + 1;
        for (Thread* thread : step.waiting) wake(*thread);
        break;
    }
  }
}

// Returns the results in flight that these registers of the running thread belong to, or none.
std::shared_ptr<Results> results_in_flight(Group& group, const float* d, int columns, const Site& site) {
  const size_t thread = thread_in_group();
  const auto look = [&](const Product& product) {
    const Results& results = *product.results;
    const float* const registers = results.registers[thread];
    if (registers == nullptr) return false;
    if (registers == d && results.columns == columns) return true;
    if (d < registers + results.each() && registers < d + columns / 2) {
      fail(whereabouts() + " gives " + to_string(site) + " registers at " + hexadecimal(d) +
           ", some of which are results of " + to_string(product.site) + " and others not");
    }
    return false;
  };
  // The newest products are those that other threads of the group have not come to yet.
  for (auto step = group.steps.rbegin(); step != group.steps.rend(); ++step) {
    if (step->product.results != nullptr && look(step->product)) return step->product.results;
  }
  for (const Product& product : group.in_flight) {
    if (look(product)) return product.results;
  }
  return nullptr;
}

// Writes a line beside the report of shared memory, so that its reader knows that there were products.
void tell_of_products() {
  if (!options().banks) return;
  static const bool told_at_exit =
      std::atexit([] { std::fprintf(stderr, "cuda emulator: products of warpgroups\n"); }) == 0;
  static_cast<void>(told_at_exit);
}

}  // namespace

void start_block() { groups.assign(block().threads.size() / kThreads, Group()); }

void end_thread() {
  if (groups.empty()) return;
  const auto number = static_cast<size_t>(self().number / kGroupThreads);
  if (number >= groups.size()) return;
  const Group& group = groups[number];
  const Site* site = nullptr;
  if (!group.in_flight.empty()) site = &group.in_flight.front().site;
  for (const Step& step : group.steps) {
    if (site == nullptr && step.kind == Kind::kProduct) site = &step.site;
  }
  if (site == nullptr) return;
  fail(whereabouts() + " ends, and has not waited for " + to_string(*site));
}

int group_of_self(const Site& site) {
  require_hopper(site);
  const int number = self().number / kGroupThreads;
  if (number >= static_cast<int>(block().threads.size()) / kGroupThreads) {
    fail(whereabouts() + " comes to " + to_string(site) + ", but its warpgroup lacks some of 128 threads");
  }
  return number;
}

void multiply(const Form& form, float* d, const uint32_t* a, uint64_t a_matrix, uint64_t b_matrix, bool adds,
              const Site& site) {
  const int number = group_of_self(site);
  Group& group = groups[static_cast<size_t>(number)];
  const size_t thread = thread_in_group();
  std::shared_ptr<Results> before = results_in_flight(group, d, form.columns, site);
  Step& step = next_step(number, Kind::kProduct, 0, site);
  Product& product = step.product;
  if (step.arrived == 1) {
    tell_of_products();
    if (a == nullptr) check_matrix(a_matrix, kProductRows, form.left_turned, site);
    check_matrix(b_matrix, form.columns, form.right_turned, site);
    product.form = form;
    product.in_registers = a != nullptr;
    product.a_matrix = a_matrix;
    product.b_matrix = b_matrix;
    product.adds = adds;
    product.is_new = before == nullptr;
    product.results = before != nullptr ? before : std::make_shared<Results>();
    ++product.results->products;
    if (product.is_new) {
      product.results->columns = form.columns;
      product.results->values.resize(kThreads * static_cast<size_t>(form.columns) / 2);
    }
  }
  const Form& others = product.form;
  if (others.bfloat16 != form.bfloat16 || others.columns != form.columns ||
      others.left_turned != form.left_turned || others.right_turned != form.right_turned ||
      product.in_registers != (a != nullptr) || product.a_matrix != a_matrix ||
      product.b_matrix != b_matrix || product.adds != adds ||
      before != (product.is_new ? nullptr : product.results)) {
    fail("the warpgroup diverges: " + whereabouts() + " comes to " + to_string(site) +
         " with other operands than other threads in " + to_string(step.site));
  }
  Results& results = *product.results;
  if (product.is_new) {
    // From here on the values of the thread's registers belong to the product.
    results.registers[thread] = d;
    std::memcpy(results.of(thread), d, static_cast<size_t>(results.each()) * sizeof(float));
    std::memset(d, 0xff, static_cast<size_t>(results.each()) * sizeof(float));
  }
  if (a != nullptr) {
    std::memcpy(product.a[thread].data(), a, sizeof(product.a[thread]));
    product.a_registers[thread] = a;
  }
  races::meet(step.knowledge, step.arrived == 1);
  complete_steps(group);
}

void fence(const Site& site) {
  const int number = group_of_self(site);
  next_step(number, Kind::kFence, 0, site);
  complete_steps(groups[static_cast<size_t>(number)]);
}

void commit(const Site& site) {
  const int number = group_of_self(site);
  next_step(number, Kind::kCommit, 0, site);
  complete_steps(groups[static_cast<size_t>(number)]);
}

void wait(int pending, const Site& site) {
  const int number = group_of_self(site);
  Group& group = groups[static_cast<size_t>(number)];
  const int64_t mine = group.taken[thread_in_group()];
  Step& step = next_step(number, Kind::kWait, pending, site);
  if (step.arrived < kGroupThreads) step.waiting.push_back(&self());
  complete_steps(group);
  while (group.waits_passed <= mine) emulator::wait(site);
  races::products_finished(number, group.waited);
}

std::string what_groups_lack() {
  std::string text;
  for (size_t number = 0; number < groups.size(); ++number) {
    if (groups[number].steps.empty()) continue;
    const Step& step = groups[number].steps.front();
    text += "\n  of warpgroup " + std::to_string(number) + " " + std::to_string(step.arrived) +
            " threads have come to " + to_string(step.site);
  }
  return text;
}

void pass() {
  if (options().copies != Copies::kRandom) return;
  for (Group& group : groups) {
    if (!group.in_flight.empty() && random_number() % 4 == 0) next_happens(group);
  }
}

}  // namespace selfattn::emulator::products
