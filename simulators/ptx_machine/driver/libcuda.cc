// The driver library that torch looks for. That it is there is enough: what torch needs of a GPU it asks the
// runtime for. (Not *.cpp, which are the machine's sources.)
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

// NVRTC asks for tables of functions, and looks at their sizes: these have none.
int cuGetExportTable(const void** table, const void*) {
  static const unsigned long long kBytes = sizeof(kBytes);
  *table = &kBytes;
  return 0;
}
}
