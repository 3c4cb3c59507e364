// What Python sees: checks shapes, dtypes and devices, then launches the kernels on the current stream.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <limits>
#include <type_traits>

#include "kernels.h"

#ifndef OASIS_DEVICE  // the tests' CPU in the place of a GPU
#define OASIS_DEVICE kDLCUDA
#endif

namespace oasis {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

void require(bool condition, const char* what) {
  if (!condition) TVM_FFI_THROW(ValueError) << "sglang-oasis CUDA kernel: " << what;
}

void succeed(const char* error) {
  if (error) TVM_FFI_THROW(RuntimeError) << "sglang-oasis CUDA kernel: " << error << ".";
}

int narrow(int64_t value) {
  require(value >= 0 && value <= std::numeric_limits<int>::max(), "a size is larger than 2^31 - 1");
  return static_cast<int>(value);
}

void on_device(const TensorView& tensor, const TensorView& first, const char* what) {
  require(first.device().device_type == OASIS_DEVICE && tensor.device().device_type == first.device().device_type &&
              tensor.device().device_id == first.device().device_id && tensor.is_contiguous(),
          what);
}

// Memory of a contiguous tensor of T that is where `first` is.
template <typename T>
T* data(const TensorView& tensor, const TensorView& first, const char* what) {
  const DLDataType dtype = tensor.dtype();
  const int code = std::is_floating_point_v<T> ? kDLFloat : std::is_signed_v<T> ? kDLInt : kDLUInt;
  require(dtype.bits == 8 * sizeof(T) && dtype.code == code && dtype.lanes == 1, what);
  on_device(tensor, first, what);
  return static_cast<T*>(tensor.data_ptr());
}

Element element_of(const TensorView& tensor) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32) return Element::kFloat32;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Element::kFloat16;
  require(dtype.code == kDLBfloat && dtype.bits == 16, "the dtype must be float32, float16 or bfloat16");
  return Element::kBFloat16;
}

void require_aligned(const TensorView& tensor, const char* what) {
  require(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, what);
}

Maps maps_of(const TensorView& head_map, const TensorView& last_selected, const TensorView& slot_of) {
  for (const TensorView& map : {head_map, last_selected, slot_of})
    require(map.ndim() == 3 && map.size(0) == head_map.size(0) && map.size(1) == head_map.size(1),
            "maps must be [S, H, K], [S, H, K] and [S, H, N], of the same rows and heads");
  require(last_selected.size(2) == head_map.size(2), "maps must have one entry per selected slot");
  return {data<int32_t>(head_map, head_map, "head_map must be contiguous int32 on the device"),
          data<int32_t>(last_selected, head_map, "last_selected must be contiguous int32 on the device"),
          data<int32_t>(slot_of, head_map, "slot_of must be contiguous int32 on the device"),
          narrow(head_map.size(1)),
          narrow(head_map.size(2)),
          narrow(slot_of.size(2))};
}

Admissions admissions_of(const TensorView& blocks, const TensorView& slots, const TensorView& rows,
                         const TensorView& head_map) {
  for (const TensorView& half : {blocks, slots})
    require(half.ndim() == 3 && half.size(0) == rows.size(0) && half.size(1) == head_map.size(1) &&
                half.size(2) == blocks.size(2),
            "admissions must be two of [n, H, C]");
  return {data<int32_t>(blocks, head_map, "admitted blocks must be contiguous int32 on the device"),
          data<int32_t>(slots, head_map, "admitted slots must be contiguous int32 on the device"),
          narrow(blocks.size(2))};
}

template <typename T>
T* one(const TensorView& tensor, const TensorView& first, const char* what) {
  require(tensor.ndim() == 1 && tensor.size(0) == 1, what);
  return data<T>(tensor, first, what);
}

const int64_t* rows_of(const TensorView& rows, const TensorView& first) {
  require(rows.ndim() == 1, "rows must be [n]");
  return data<int64_t>(rows, first, "rows must be contiguous int64 on the device");
}

void* stream_of(const TensorView& tensor) {
  return TVMFFIEnvGetStream(tensor.device().device_type, tensor.device().device_id);
}

void fetch_blocks_op(TensorView resident, TensorView head_map, TensorView last_selected, TensorView slot_of,
                     TensorView host, TensorView req_to_token, TensorView rows, TensorView admitted_blocks,
                     TensorView admitted_slots, TensorView number, int64_t offset, int64_t thread_blocks) {
  require(resident.ndim() == 6 && host.ndim() == 5 && resident.size(3) == 2 && host.size(2) == 2 &&
              resident.size(1) == host.size(1) && resident.size(4) == host.size(3) && resident.size(5) == host.size(4),
          "blocks must be [S, H, P, 2, B, D], host_kv [pages, H, 2, B, D], of the same heads, B and D");
  const Element element = element_of(resident);
  require(element == element_of(host), "both tiers must have one dtype");
  const DLDeviceType place = host.device().device_type;
  require(place == kDLCPU || place == kDLCUDAHost || place == OASIS_DEVICE, "host_kv must be in pinned host memory");
  require(host.is_contiguous(), "host_kv must be contiguous");
  on_device(resident, head_map, "blocks must be contiguous on the device of the maps");
  require_aligned(resident, "blocks must start at a multiple of 16 bytes");
  require_aligned(host, "host_kv must start at a multiple of 16 bytes");
  const int64_t chunk_bytes = 2 * host.size(3) * host.size(4) * (element == Element::kFloat32 ? 4 : 2);
  require(chunk_bytes % 16 == 0, "K and V of a block and head must be a multiple of 16 bytes");
  require(req_to_token.ndim() == 2, "req_to_token must be [S, context]");
  const Maps maps = maps_of(head_map, last_selected, slot_of);
  require(head_map.size(0) == resident.size(0) && maps.heads == resident.size(1) && maps.selected <= resident.size(2),
          "the maps must have the rows and heads of the blocks, and no more slots");
  const FetchArgs args{static_cast<const unsigned char*>(host.data_ptr()),
                       static_cast<unsigned char*>(resident.data_ptr()),
                       chunk_bytes,
                       narrow(resident.size(2)),
                       narrow(host.size(3)),
                       data<int32_t>(req_to_token, head_map, "req_to_token must be contiguous int32 on the device"),
                       req_to_token.size(1),
                       maps,
                       rows_of(rows, head_map),
                       narrow(rows.size(0)),
                       admissions_of(admitted_blocks, admitted_slots, rows, head_map),
                       one<int32_t>(number, head_map, "number must be [1] int32 on the device"),
                       narrow(offset)};
  require(thread_blocks > 0, "at least one thread block must copy");
  if (admitted_blocks.numel() > 0) succeed(fetch_blocks(args, narrow(thread_blocks), stream_of(head_map)));
}

// What of the arguments of fused_select decides how much shared memory it takes.
SelectArgs sizes_of(const TensorView& queries, int64_t heads, int64_t selected) {
  require(queries.ndim() == 4 && heads > 0 && queries.size(2) % heads == 0, "queries must be [n, Q, H * G, D]");
  SelectArgs args{};
  args.element = element_of(queries);
  args.num_queries = narrow(queries.size(1));
  args.group = narrow(queries.size(2) / heads);
  args.head_dim = narrow(queries.size(3));
  args.maps.selected = narrow(selected);
  return args;
}

bool fused_select_fits_op(TensorView queries, int64_t bits, int64_t heads, int64_t selected) {
  return fused_select_fits(sizes_of(queries, heads, selected), narrow(bits));
}

void fused_select_op(TensorView queries, TensorView records, int64_t bits, Optional<TensorView> scaling,
                     TensorView rows, TensorView candidates, TensorView head_map, TensorView last_selected,
                     TensorView slot_of, Optional<TensorView> averages, double scale, double tightness, double decay,
                     double escape, int64_t sinks, TensorView number, int64_t offset, TensorView cap,
                     TensorView admitted_blocks, TensorView admitted_slots, TensorView counters, TensorView scratch,
                     int64_t shared_limit) {
  const Maps maps = maps_of(head_map, last_selected, slot_of);
  const int64_t n = rows.size(0), heads = maps.heads, blocks = maps.logical_blocks;
  require(queries.ndim() == 4 && queries.size(0) == n && queries.size(1) > 0 && queries.size(2) > 0 &&
              queries.size(2) % heads == 0,
          "queries must be [n, Q, H * G, D]");
  const int64_t head_dim = queries.size(3);
  require(head_dim % 16 == 0 && head_dim > 0 && head_dim <= 256, "the head dimension must be a multiple of 16, 256 at most");
  require(bits == 16 || bits == 8 || bits == 4, "summaries have 16, 8 or 4 bits");
  require(records.ndim() == 4 && records.size(0) == head_map.size(0) && records.size(1) == heads &&
              records.size(2) == blocks && records.size(3) == 2 * head_dim * bits / 8 + (bits < 16 ? 4 : 0),
          "summaries must be [S, H, N, R], of the rows, heads and blocks of the maps");
  require_aligned(records, "summaries must start at a multiple of 16 bytes");
  require(blocks < 1 << 24, "a row has 2^24 blocks at most");
  require(candidates.ndim() == 1 && candidates.size(0) == n, "one number of candidates per row");
  require(counters.ndim() == 1 && counters.size(0) == 2, "counters must be [2]");
  require(scratch.ndim() == 3 && scratch.size(0) >= n && scratch.size(1) == heads && scratch.size(2) == blocks,
          "scratch must be [n, H, N], of at least as many entries");
  if (averages)
    require(averages.value().ndim() == 3 && averages.value().size(0) == head_map.size(0) &&
                averages.value().size(1) == heads && averages.value().size(2) == blocks,
            "averages must be [S, H, N], of the rows, heads and blocks of the maps");
  if (scaling)
    require(scaling.value().ndim() == 3 && scaling.value().size(0) == heads && scaling.value().size(1) == 5 &&
                scaling.value().size(2) == head_dim,
            "a scaling must be [H, 5, D], of the heads of the maps");
  on_device(queries, head_map, "queries must be contiguous on the device of the maps");
  const char* what = "averages and scratch must be contiguous float32 on the device of the maps";
  const SelectArgs args{
      queries.data_ptr(),
      element_of(queries),
      narrow(queries.size(1)),
      narrow(queries.size(2) / heads),
      narrow(head_dim),
      data<uint8_t>(records, head_map, "summaries must be contiguous uint8 on the device"),
      narrow(records.size(3)),
      scaling ? data<float>(scaling.value(), head_map, "a scaling must be contiguous float32 on the device") : nullptr,
      static_cast<float>(scale),
      static_cast<float>(tightness),
      averages ? data<float>(averages.value(), head_map, what) : nullptr,
      static_cast<float>(decay),
      static_cast<float>(1 - decay),
      static_cast<float>(escape),
      narrow(sinks),
      rows_of(rows, head_map),
      data<int32_t>(candidates, head_map, "candidates must be contiguous int32 on the device"),
      narrow(n),
      maps,
      one<int32_t>(number, head_map, "number must be [1] int32 on the device"),
      narrow(offset),
      one<int32_t>(cap, head_map, "cap must be [1] int32 on the device"),
      admissions_of(admitted_blocks, admitted_slots, rows, head_map),
      reinterpret_cast<unsigned long long*>(data<int64_t>(counters, head_map, "counters must be int64 on the device")),
      data<float>(scratch, head_map, what),
      {}};
  if (n > 0) succeed(fused_select(args, narrow(bits), narrow(shared_limit), stream_of(head_map)));
}

}  // namespace
}  // namespace oasis

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fetch_blocks, oasis::fetch_blocks_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_select_fits, oasis::fused_select_fits_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_select, oasis::fused_select_op);
