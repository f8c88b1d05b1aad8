// The vector interface of every instruction set: each operation against scalar arithmetic, on special numbers
// and on every value of the 16-bit types.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/cpu_features.h"
#include "cpu/isa/simd_common.h"

#include "check.h"

#if defined(__x86_64__)
#define SELFATTN_ISA avx512
#include "cpu/isa/begin_avx512.h"
#include "cpu/isa/simd_avx512.h"
#include "simd_checks.h"
#include "cpu/isa/end_target.h"
#undef SELFATTN_ISA
#define SELFATTN_ISA avx2
#include "cpu/isa/begin_avx2.h"
#include "cpu/isa/simd_avx2.h"
#include "simd_checks.h"
#include "cpu/isa/end_target.h"
#undef SELFATTN_ISA
#elif defined(__aarch64__)
#define SELFATTN_ISA neon
#include "cpu/isa/begin_baseline.h"
#include "cpu/isa/simd_neon.h"
#include "simd_checks.h"
#undef SELFATTN_ISA
#endif

#define SELFATTN_ISA scalar
#include "cpu/isa/begin_baseline.h"
#include "cpu/isa/simd_scalar.h"
#include "simd_checks.h"
#include "cpu/isa/end_target.h"

using namespace selfattn;

namespace {

template <class Findings>
void report(const Findings& findings) {
  for (int i = 0; i < findings.count; ++i) {
    test::fail(__FILE__, __LINE__,
               std::string(findings.what[i]) + ", case " + std::to_string(findings.which[i]));
  }
}

}  // namespace

#if defined(__x86_64__)
TEST(avx512) {
  const cpu::CpuFeatures& f = cpu::cpu_features();
  if (f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl) report(cpu::avx512::check_simd(true));
}

TEST(avx2) {
  const cpu::CpuFeatures& f = cpu::cpu_features();
  if (f.avx2 && f.fma && f.f16c) report(cpu::avx2::check_simd(true));
}
#elif defined(__aarch64__)
TEST(neon) { report(cpu::neon::check_simd(true)); }
#endif

TEST(scalar) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  report(cpu::scalar::check_simd(true));
#else
  report(cpu::scalar::check_simd(false));
#endif
}
