// Accesses to memory that does not exist end the launch with a report, not the process.
#pragma once

namespace selfattn::emulator {

// Handles SIGSEGV and SIGBUS as long as it lives; outside of that, other handlers stay in place.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;
};

}  // namespace selfattn::emulator
