// The driver library that torch looks for. Its presence is enough, as torch asks the runtime for what it
// needs of a GPU. (The name does not end in .cpp, so that the build does not take it for one of the machine's
// sources.)
extern "C" {

int cuInit(unsigned) { return 0; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuGetErrorString(int, const char** text) {
  *text = "the PTX machine has no driver";
  return 0;
}

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  static int one;
  *context = &one;
  return 0;
}

int cuCtxSetCurrent(void*) { return 0; }

// NVRTC asks for tables of functions, and looks at their sizes: these tables are empty.
int cuGetExportTable(const void** table, const void*) {
  static const unsigned long long kBytes = sizeof(kBytes);
  *table = &kBytes;
  return 0;
}
}
