// The kernels of csrc/cuda and their bindings, as one file for a C++ compiler, and what only tests ask them.
#include "cuda_on_cpu.h"

#define OASIS_DEVICE kDLCPU
#include "bindings.cpp"
#include "fetch_blocks.cu"
#include "fused_select.cu"

namespace oasis {

int64_t bytes_read() { return machine.bytes_read; }

// Shared memory that fused_select needs for everything but the logits.
int64_t shared_bytes_without_logits(TensorView queries, int64_t bits, int64_t heads, int64_t selected) {
  return least_shared(sizes_of(queries, heads, selected), narrow(bits));
}

}  // namespace oasis

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bytes_read, oasis::bytes_read);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes_without_logits, oasis::shared_bytes_without_logits);
