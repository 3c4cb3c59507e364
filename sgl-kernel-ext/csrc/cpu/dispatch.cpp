#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace oasis {

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> tables;
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) tables.push_back(&kernels_avx512bf16);
  if (avx512) tables.push_back(&kernels_avx512);
  if (avx2) tables.push_back(&kernels_avx2);
#endif
  tables.push_back(&kernels_baseline);
  return tables;
}

namespace {

const Kernels& choose() {
  const char* wanted = std::getenv("SGLANG_OASIS_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string possible;
  for (const Kernels* table : runnable_kernels()) {
    if (any || std::strcmp(wanted, table->isa) == 0) return *table;
    possible += std::string(possible.empty() ? "" : ", ") + table->isa;
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
