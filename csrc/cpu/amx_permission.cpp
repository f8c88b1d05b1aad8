// Asks Linux for AMX, or finds an emulator of it.
#include "amx_permission.h"

#include "cpu_features.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

// Few machines have AMX, and the kernels that use it must be tested on the others too: simulators/amx
// executes the instructions of the compiled library in a signal handler, and defines this function. The
// library itself does not define it; the reference is weak, so that the loader sets it to null if no emulator
// is preloaded or linked in. The visibility is spelled out because the linker would set a hidden reference to
// null for ever.
extern "C" bool selfattn_emulates_amx() __attribute__((weak, visibility("default")));
#endif

namespace selfattn::cpu {

namespace {

#if defined(__linux__) && defined(__x86_64__)

bool emulated() { return selfattn_emulates_amx != nullptr && selfattn_emulates_amx(); }

bool ask_linux() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, in headers since Linux 5.16 only
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool emulated() { return false; }
bool ask_linux() { return false; }

#endif

}  // namespace

bool amx_permitted() {
  // Linux is asked first, even for an emulator: a processor that has AMX executes some of its instructions
  // without permission, and traps at the others.
  static const bool permitted = ask_linux() || emulated();
  return permitted;
}

const char* amx_unavailable_reason() {
  if (emulated() && amx_permitted()) return nullptr;
  const CpuFeatures& f = cpu_features();
  if (f.amx_bf16_unsaved) return "the operating system does not save AMX registers (Linux does since 5.16)";
  if (!f.amx_tile || !f.amx_bf16) return "this processor lacks AMX-BF16";
  if (amx_permitted()) return nullptr;
  return "the operating system refuses AMX to this process (arch_prctl: sandboxes and old kernels do, and so "
         "does Linux when a thread's signal stack is too small for the registers)";
}

}  // namespace selfattn::cpu
