// Accesses to memory that is not there: within a launch they end it with a report, not the process with a
// signal.
#pragma once

namespace selfattn::emulator {

// Handles SIGSEGV and SIGBUS while it lives; elsewhere other handlers are left alone.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;
};

}  // namespace selfattn::emulator
