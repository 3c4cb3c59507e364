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
  SelectArgs args{};
  args.element = element_of(queries);
  args.num_queries = narrow(queries.size(1));
  args.group = narrow(queries.size(2) / heads);
  args.head_dim = narrow(queries.size(3));
  args.maps.selected = narrow(selected);
  if (bits == Int4::kBits) return shared_layout<Int4>(args, 0).logits;
  if (bits == Int8::kBits) return shared_layout<Int8>(args, 0).logits;
  return shared_layout<BFloat16>(args, 0).logits;
}

}  // namespace oasis

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bytes_read, oasis::bytes_read);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes_without_logits, oasis::shared_bytes_without_logits);
