#include "options.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ptx_machine {

namespace {

const char* text(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

[[noreturn]] void refuse(const char* variable, const char* allowed) {
  std::fprintf(stderr, "ptx machine: %s must be %s, but it is \"%s\"\n", variable, allowed, text(variable));
  std::_Exit(2);
}

double number(const char* variable, double otherwise) {
  const char* value = text(variable);
  if (value == nullptr) return otherwise;
  char* end = nullptr;
  const double result = std::strtod(value, &end);
  if (*end != '\0' || !(result >= 0)) refuse(variable, "a number");
  return result;
}

bool is_set(const char* variable, bool otherwise) { return number(variable, otherwise ? 1 : 0) != 0; }

int capability() {
  const char* const variable = "SELFATTN_PTX_CAPABILITY";
  const int value = static_cast<int>(number(variable, Options().capability));
  for (const int known : {75, 80, 86, 87, 89, 90, 100, 103, 120, 121}) {
    if (value == known) return value;
  }
  refuse(variable, "75, 80, 86, 87, 89, 90, 100, 103, 120 or 121");
}

bool late_copies() {
  const char* const variable = "SELFATTN_PTX_COPIES";
  const char* value = text(variable);
  if (value == nullptr || std::strcmp(value, "late") == 0) return true;
  if (std::strcmp(value, "eager") != 0) refuse(variable, "late or eager");
  return false;
}

Options read() {
  Options read;
  read.capability = capability();
  read.schedule = static_cast<u64>(number("SELFATTN_PTX_SCHEDULE", 0));
  read.late_copies = late_copies();
  read.races = is_set("SELFATTN_PTX_RACES", false);
  read.banks = is_set("SELFATTN_PTX_BANKS", false);
  read.profile = is_set("SELFATTN_PTX_PROFILE", false);
  read.summary = is_set("SELFATTN_PTX_SUMMARY", false);
  read.execute = is_set("SELFATTN_PTX_EXECUTE", true);
  read.abort = is_set("SELFATTN_PTX_ABORT", false);
  read.verbose = static_cast<int>(number("SELFATTN_PTX_VERBOSE", 0));
  read.approximation = static_cast<int>(number("SELFATTN_PTX_APPROXIMATION", 0));
  read.left_out = static_cast<u32>(number("SELFATTN_PTX_LEFT_OUT", 0));
  read.gigabytes = number("SELFATTN_PTX_MEMORY", read.gigabytes);
  if (const char* log = text("SELFATTN_PTX_LOG")) read.log = log;
  if (const char* counts = text("SELFATTN_PTX_COUNTS")) read.counts = counts;
  return read;
}

Options& current() {
  static Options options = read();
  return options;
}

}  // namespace

const Options& options() { return current(); }

u32 shared_memory_limit(int capability) {
  // The numbers are from the CUDA C++ Programming Guide, technical specifications per compute capability.
  switch (capability) {
    case 75:
      return 64 * 1024;
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

}  // namespace ptx_machine

// A process that runs kernels in several ways calls these, because starting one takes longer than they run.
extern "C" __attribute__((visibility("default"))) void ptx_machine_choose_order(unsigned long long schedule,
                                                                                int late_copies) {
  ptx_machine::current().schedule = schedule;
  ptx_machine::current().late_copies = late_copies != 0;
}
extern "C" __attribute__((visibility("default"))) void ptx_machine_leave_out(unsigned number) {
  ptx_machine::current().left_out = number;
}
