// The kernel table: what is listed, what is chosen, what is refused.
#include "cpu/cpu_kernel_table.h"

#include <cstring>
#include <stdexcept>

#include "check.h"
#include "cpu/cpu_features.h"

using namespace selfattn;
using cpu::choose_kernel;
using cpu::force_isa;
using cpu::Kernel;

namespace {

std::vector<const Kernel*> table() {
  int count = 0;
  const Kernel* const* kernels = cpu::all_kernels(&count);
  return {kernels, kernels + count};
}

bool equal(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

}  // namespace

TEST(every_entry_is_complete) {
  for (const Kernel* kernel : table()) {
    CHECK(kernel->name[0] != '\0' && kernel->isa[0] != '\0' && kernel->description[0] != '\0');
    CHECK(kernel->forward != nullptr && kernel->weights != nullptr);
    CHECK(kernel->backward_workspace != nullptr && kernel->backward != nullptr);
    CHECK(kernel->scores != nullptr && kernel->scores_backward != nullptr);
    CHECK(kernel->masked_softmax != nullptr && kernel->masked_softmax_backward != nullptr);
    // Forward mode and second derivatives come together, and every kernel that can be chosen by itself has
    // them.
    CHECK((kernel->backward_backward != nullptr) == (kernel->jvp != nullptr));
    CHECK((kernel->backward_backward_workspace != nullptr) == (kernel->jvp != nullptr));
    CHECK(kernel->jvp != nullptr || !kernel->automatic);
  }
}

TEST(the_first_available_automatic_kernel_is_chosen) {
  force_isa("");
  for (const Kernel* kernel : table()) {
    if (!kernel->automatic || cpu::unavailable_reason(*kernel) != nullptr) continue;
    CHECK(&choose_kernel("") == kernel);
    break;
  }
  CHECK(choose_kernel("").automatic);
}

TEST(loops_is_taken_only_by_name) {
  force_isa("");
  const Kernel& loops = choose_kernel("loops");
  CHECK(equal(loops.name, "loops"));
  CHECK(!loops.automatic);
  CHECK(&choose_kernel("") != &loops);
}

TEST(a_forced_isa_is_the_one_that_runs) {
  for (const Kernel* kernel : table()) {
    if (!kernel->automatic) continue;
    if (cpu::unavailable_reason(*kernel) != nullptr) {
      CHECK_THROWS(force_isa(kernel->isa), std::invalid_argument, kernel->isa);
      continue;
    }
    force_isa(kernel->isa);
    CHECK(cpu::forced_isa() == kernel->isa);
    CHECK(equal(choose_kernel("").isa, kernel->isa));
    CHECK(equal(choose_kernel("fused").isa, kernel->isa));
    CHECK(&choose_kernel("") == (kernel->when_forced != nullptr ? kernel->when_forced : kernel));
    CHECK(equal(choose_kernel("loops").name, "loops"));
  }
  force_isa("");
  CHECK(cpu::forced_isa().empty());
}

TEST(unknown_names_are_refused_and_change_nothing) {
  force_isa("scalar");
  CHECK_THROWS(force_isa("sse9"), std::invalid_argument, "sse9");
  CHECK_THROWS(force_isa("sse9"), std::invalid_argument, "\"scalar\"");
  CHECK(cpu::forced_isa() == "scalar");
  force_isa("");
  CHECK_THROWS(choose_kernel("fast"), std::invalid_argument, "\"fast\"");
  CHECK_THROWS(choose_kernel("fast"), std::invalid_argument, "\"loops\"");
}

TEST(features_have_names) {
  CHECK(cpu::cpu_features().architecture[0] != '\0');
  CHECK(cpu::cpu_feature_count() > 0);
  for (int n = 0; n < cpu::cpu_feature_count(); ++n) CHECK(cpu::cpu_feature(n).name[0] != '\0');
}
