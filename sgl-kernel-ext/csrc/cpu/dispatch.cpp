#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace oasis {
namespace {

const Kernels& choose() {
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const struct {
    const Kernels& table;
    bool runs;
  } candidates[] = {{kernels_avx512bf16, bf16}, {kernels_avx512, avx512}, {kernels_avx2, avx2}, {kernels_baseline, true}};
#else
  const struct {
    const Kernels& table;
    bool runs;
  } candidates[] = {{kernels_baseline, true}};
#endif
  const char* wanted = std::getenv("SGLANG_OASIS_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string possible;
  for (const auto& candidate : candidates) {
    if (!candidate.runs) continue;
    if (any || std::strcmp(wanted, candidate.table.isa) == 0) return candidate.table;
    possible += std::string(possible.empty() ? "" : ", ") + candidate.table.isa;
  }
  throw std::runtime_error("SGLANG_OASIS_CPU_ISA is " + std::string(wanted) + ", which this machine does not run: use " +
                           possible + ", or unset it to let the fastest be chosen.");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace oasis
