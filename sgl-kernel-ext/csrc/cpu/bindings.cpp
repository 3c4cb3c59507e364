// What Python sees: checks shapes, dtypes and strides, then calls the kernels. Shapes as in sglang_oasis/ops.
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "attention.h"
#include "dispatch.h"
#include "kernels.h"
#include "pipeline.h"
#include "thread_pool.h"
#include "tiers.h"

namespace oasis {
namespace {

using tvm::ffi::TensorView;

void require(bool condition, const char* what) {
  if (!condition) TVM_FFI_THROW(ValueError) << "sglang-oasis CPU kernel: " << what;
}

DType float_dtype(const TensorView& tensor) {
  require(tensor.device().device_type == kDLCPU, "tensors must be in host memory");
  const DLDataType dtype = tensor.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32) return DType::kFloat32;
  if (dtype.code == kDLFloat && dtype.bits == 16) return DType::kFloat16;
  require(dtype.code == kDLBfloat && dtype.bits == 16, "the dtype must be float32, float16 or bfloat16");
  return DType::kBFloat16;
}

template <typename T>
T* data(const TensorView& tensor, const char* what) {
  require(tensor.device().device_type == kDLCPU, "tensors must be in host memory");
  const DLDataType dtype = tensor.dtype();
  const bool is_signed = std::is_signed_v<T>;
  require(dtype.bits == 8 * sizeof(T) && dtype.code == (is_signed ? kDLInt : kDLUInt) && tensor.is_contiguous(), what);
  return static_cast<T*>(tensor.data_ptr());
}

float* float_data(const TensorView& tensor, const char* what) {
  require(float_dtype(tensor) == DType::kFloat32 && tensor.is_contiguous(), what);
  return static_cast<float*>(tensor.data_ptr());
}

// [S, H, P, 2, B, D], or [N, H, 2, B, D] with the pages as the slots of one row.
ChunkPool chunk_pool(const TensorView& tensor) {
  const int rank = tensor.ndim();
  require(rank == 5 || rank == 6, "blocks must be [rows, heads, slots, 2, B, D] or [pages, heads, 2, B, D]");
  const int64_t block_size = tensor.size(-2), head_dim = tensor.size(-1);
  require(head_dim % 16 == 0 && head_dim <= 512, "the head dimension must be a multiple of 16, 512 at most");
  require(tensor.size(-3) == 2 && tensor.stride(-1) == 1 && tensor.stride(-2) == head_dim &&
              tensor.stride(-3) == block_size * head_dim,
          "K and V of a block must be one contiguous chunk");
  const DType dtype = float_dtype(tensor);
  const int64_t bytes = element_bytes(dtype);
  auto* memory = static_cast<char*>(tensor.data_ptr());
  if (rank == 5)
    return {memory, 0, tensor.stride(1) * bytes, tensor.stride(0) * bytes, tensor.size(1), block_size, head_dim, dtype};
  return {memory,         tensor.stride(0) * bytes, tensor.stride(1) * bytes, tensor.stride(2) * bytes,
          tensor.size(1), block_size,               head_dim,                 dtype};
}

// [T, heads, D] whose heads lie side by side; torch gives tensors without elements any strides.
int64_t token_stride(const TensorView& tensor, int64_t heads, int64_t head_dim) {
  require(tensor.ndim() == 3 && tensor.size(1) == heads && tensor.size(2) == head_dim &&
              (tensor.size(0) == 0 ||
               (tensor.stride(2) == 1 && (heads == 1 || tensor.stride(1) == head_dim))),
          "tokens must be [T, heads, D] with contiguous vectors");
  return tensor.stride(0);
}

SummaryFormat summary_format(int64_t bits) {
  require(bits == 16 || bits == 8 || bits == 4, "summaries have 16, 8 or 4 bits");
  return bits == 16 ? SummaryFormat::kBFloat16 : bits == 8 ? SummaryFormat::kInt8 : SummaryFormat::kInt4;
}

void paged_attention(TensorView query, TensorView blocks, TensorView rows, TensorView slots, TensorView kv_lengths,
                     TensorView query_starts, double scale, TensorView out) {
  const ChunkPool pool = chunk_pool(blocks);
  const int64_t query_heads = query.size(1);
  require(query_heads % pool.kv_heads == 0, "query heads must be a multiple of KV heads");
  require(out.is_contiguous() && float_dtype(out) == float_dtype(query), "out must be contiguous, with query's dtype");
  const int64_t sequences = kv_lengths.size(0);
  require(rows.size(0) == sequences && slots.size(0) == sequences && query_starts.size(0) == sequences + 1,
          "rows, slots, kv_lengths and query_starts must agree on the number of sequences");
  attention({pool, query.data_ptr(), out.data_ptr(), float_dtype(query),
             token_stride(query, query_heads, pool.head_dim), query_heads / pool.kv_heads,
             data<int64_t>(rows, "rows must be contiguous int64"), data<int32_t>(slots, "slots must be int32"), slots.size(1),
             data<int32_t>(kv_lengths, "kv_lengths must be contiguous int32"),
             data<int32_t>(query_starts, "query_starts must be contiguous int32"), sequences, static_cast<float>(scale)});
}

NewTokens new_tokens(const ChunkPool& pool, const TensorView& positions, const TensorView& keys,
                     const TensorView& values) {
  require(float_dtype(keys) == float_dtype(values), "keys and values must have one dtype");
  require(keys.size(0) == positions.size(0) && values.size(0) == positions.size(0), "one position per token");
  return {keys.data_ptr(),
          values.data_ptr(),
          float_dtype(keys),
          token_stride(keys, pool.kv_heads, pool.head_dim),
          token_stride(values, pool.kv_heads, pool.head_dim),
          nullptr,
          data<int64_t>(positions, "positions must be contiguous int64"),
          positions.size(0)};
}

void store_host_tokens(TensorView host, TensorView indices, TensorView keys, TensorView values) {
  const ChunkPool pool = chunk_pool(host);
  store_tokens(pool, new_tokens(pool, indices, keys, values));
}

void store_resident_tokens(TensorView blocks, TensorView rows, TensorView positions, TensorView keys,
                           TensorView values) {
  const ChunkPool pool = chunk_pool(blocks);
  NewTokens tokens = new_tokens(pool, positions, keys, values);
  tokens.rows = data<int64_t>(rows, "rows must be contiguous int64");
  store_tokens(pool, tokens);
}

using OptionalTensor = tvm::ffi::Optional<TensorView>;

// [H, 5, D], or none.
Scaling scaling_of(const OptionalTensor& scaling, int64_t heads, int64_t dim) {
  if (!scaling.has_value()) return {nullptr, dim};
  const TensorView& given = scaling.value();
  require(given.ndim() == 3 && given.size(0) == heads && given.size(1) == 5 && given.size(2) == dim,
          "a scaling must be [H, 5, D], with the heads of the summaries");
  return {float_data(given, "a scaling must be contiguous float32"), dim};
}

void summarise(TensorView host, TensorView pages, int64_t bits, OptionalTensor scaling, TensorView records) {
  require(records.ndim() == 3 && records.size(0) == host.size(0) && records.size(1) == host.size(1) &&
              records.size(2) == summary_bytes(summary_format(bits), host.size(-1)),
          "records must be [pages, heads, R], one for every block of the host pool");
  summarise_pages(chunk_pool(host), data<int64_t>(pages, "pages must be contiguous int64"), pages.size(0),
                  {data<uint8_t>(records, "records must be contiguous uint8"), 1, summary_format(bits),
                   scaling_of(scaling, host.size(1), host.size(-1))});
}

void score_blocks(TensorView queries, TensorView records, int64_t bits, OptionalTensor scaling, TensorView candidates,
                  double scale, double tightness, TensorView scores) {
  const int64_t n = queries.size(0), num_queries = queries.size(1), query_heads = queries.size(2), dim = queries.size(3);
  const int64_t heads = records.size(1), blocks = records.size(2), record = records.size(3);
  require(queries.is_contiguous() && dim % 16 == 0 && dim <= 512, "queries must be contiguous, D a multiple of 16");
  require(record == summary_bytes(summary_format(bits), dim) && records.stride(2) == record && records.stride(3) == 1,
          "records must be [n, H, N, R] with contiguous blocks");
  const auto* first = static_cast<const uint8_t*>(records.data_ptr());
  const int64_t* count = data<int64_t>(candidates, "candidates must be contiguous int64");
  float* out = float_data(scores, "scores must be contiguous float32");
  const ChunkPool shape{nullptr, 0, 0, 0, heads, 0, dim, DType::kFloat32};
  const DType dtype = float_dtype(queries);
  const Scaling scalings = scaling_of(scaling, heads, dim);
  std::fill_n(out, n * heads * blocks, -std::numeric_limits<float>::infinity());
  thread_pool().run(n * heads, [&](int64_t i) {
    const int64_t entry = i / heads, head = i % heads, width = query_heads * dim;
    score_row(static_cast<const char*>(queries.data_ptr()) + entry * num_queries * width * element_bytes(dtype), dtype,
              width, num_queries, query_heads, shape, head, first + entry * records.stride(0) + head * records.stride(1),
              summary_format(bits), scalings, count[entry], static_cast<float>(scale), static_cast<float>(tightness),
              out + i * blocks);
  });
}

// Replaces the scores [n, H, N] of n rows by their averages over the steps.
void smooth_scores(TensorView averages, TensorView rows, TensorView scores, TensorView candidates, double decay,
                   double escape) {
  const int64_t heads = scores.size(1), width = scores.size(2), blocks = averages.size(2);
  require(averages.size(1) == heads && width <= blocks, "averages must be [S, H, N], with the heads of the scores");
  float* average = float_data(averages, "averages must be contiguous float32");
  float* score = float_data(scores, "scores must be contiguous float32");
  const int64_t* count = data<int64_t>(candidates, "candidates must be contiguous int64");
  const int64_t* row = data<int64_t>(rows, "rows must be contiguous int64");
  for (int64_t i = 0; i < scores.size(0) * heads; ++i)
    smooth({static_cast<float>(decay), static_cast<float>(escape)}, count[i / heads],
           average + (row[i / heads] * heads + i % heads) * blocks, score + i * width);
}

ResidentLayer resident_layer(const TensorView& blocks, const TensorView& head_map, const TensorView& last_selected,
                             const TensorView& slot_of) {
  require(blocks.ndim() == 6 && blocks.is_contiguous(), "resident blocks must be [S, H, K + R, 2, B, D], contiguous");
  for (const TensorView& map : {head_map, last_selected, slot_of})
    require(map.ndim() == 3 && map.size(0) == blocks.size(0) && map.size(1) == blocks.size(1),
            "maps must be [S, H, K] or [S, H, N], with the rows and heads of the blocks");
  require(head_map.size(2) <= blocks.size(2) && last_selected.size(2) == head_map.size(2),
          "maps must have one entry per selected slot");
  return {chunk_pool(blocks),
          data<int32_t>(head_map, "head_map must be contiguous int32"),
          data<int32_t>(last_selected, "last_selected must be contiguous int32"),
          data<int32_t>(slot_of, "slot_of must be contiguous int32"),
          head_map.size(2),
          slot_of.size(2)};
}

void graduate_blocks(TensorView blocks, TensorView head_map, TensorView last_selected, TensorView slot_of,
                     TensorView rows, TensorView graduates, TensorView local_slots, int64_t step) {
  require(graduates.size(0) == rows.size(0) && local_slots.size(0) == rows.size(0), "one block and local slot per row");
  graduate(resident_layer(blocks, head_map, last_selected, slot_of), data<int64_t>(rows, "rows must be contiguous int64"),
           data<int64_t>(graduates, "blocks must be contiguous int64"), data<int64_t>(local_slots, "local slots must be int64"),
           rows.size(0), static_cast<int32_t>(step));
}

// Admissions of n rows of one layer into admitted_blocks and admitted_slots [n, H, C], -1 where there is none.
int64_t select_blocks(TensorView scores, TensorView candidates, TensorView rows, TensorView head_map,
                      TensorView last_selected, TensorView slot_of, int64_t step, TensorView admitted_blocks,
                      TensorView admitted_slots) {
  const int64_t n = scores.size(0), heads = scores.size(1), blocks = scores.size(2), cap = admitted_blocks.size(2);
  ResidentLayer layer{};
  layer.blocks.kv_heads = heads;
  layer.last_selected = data<int32_t>(last_selected, "last_selected must be contiguous int32");
  layer.slot_of = data<int32_t>(slot_of, "slot_of must be contiguous int32");
  layer.selected = head_map.size(2);
  layer.logical_blocks = slot_of.size(2);
  const float* score = float_data(scores, "scores must be contiguous float32");
  const int64_t* count = data<int64_t>(candidates, "candidates must be contiguous int64");
  const int64_t* row = data<int64_t>(rows, "rows must be contiguous int64");
  auto* block = data<int32_t>(admitted_blocks, "admitted blocks must be contiguous int32");
  auto* slot = data<int32_t>(admitted_slots, "admitted slots must be contiguous int32");
  std::fill_n(block, n * heads * cap, -1);
  std::fill_n(slot, n * heads * cap, -1);
  std::vector<Admission> admissions;
  int64_t deferred = 0;
  for (int64_t i = 0; i < n * heads; ++i) {
    deferred += select_row(score + i * blocks, count[i / heads], layer, row[i / heads], i % heads,
                           static_cast<int32_t>(step), cap, admissions);
    for (size_t j = 0; j < admissions.size(); ++j) {
      block[i * cap + j] = admissions[j].block;
      slot[i * cap + j] = admissions[j].slot;
    }
  }
  return deferred;
}

void admit_blocks(TensorView host, TensorView pages, TensorView rows, TensorView admitted_blocks,
                  TensorView admitted_slots, TensorView blocks, TensorView head_map, TensorView last_selected,
                  TensorView slot_of, int64_t step) {
  const ResidentLayer layer = resident_layer(blocks, head_map, last_selected, slot_of);
  const ChunkPool pool = chunk_pool(host);
  const int64_t n = admitted_blocks.size(0), heads = admitted_blocks.size(1), cap = admitted_blocks.size(2);
  const int32_t* page = data<int32_t>(pages, "pages must be contiguous int32");
  const int64_t* row = data<int64_t>(rows, "rows must be contiguous int64");
  const auto* block = data<int32_t>(admitted_blocks, "admitted blocks must be contiguous int32");
  const auto* slot = data<int32_t>(admitted_slots, "admitted slots must be contiguous int32");
  for (int64_t i = 0; i < n * heads * cap; ++i) {
    if (block[i] < 0) continue;
    const int64_t entry = i / (heads * cap), head = i / cap % heads;
    admit(layer, pool, row[entry], head, page[entry * pages.size(1) + block[i]], {slot[i], block[i]},
          static_cast<int32_t>(step));
  }
}

// Handles are pointers: a pipeline lives from pipeline_create to pipeline_destroy.
Pipeline& pipeline_at(int64_t handle) {
  require(handle != 0, "the pipeline is closed");
  return *reinterpret_cast<Pipeline*>(handle);
}

int64_t pipeline_create(int64_t threads, double tightness, int64_t sinks, double decay, double escape) {
  const Smoothing smoothing{static_cast<float>(decay), static_cast<float>(escape)};
  return reinterpret_cast<int64_t>(
      new Pipeline(static_cast<int>(threads), {static_cast<float>(tightness), sinks, smoothing}));
}

void pipeline_destroy(int64_t handle) { delete &pipeline_at(handle); }

void pipeline_add_layer(int64_t handle, TensorView host, TensorView blocks, TensorView head_map,
                        TensorView last_selected, TensorView slot_of, TensorView records, int64_t bits,
                        OptionalTensor scaling, OptionalTensor averages) {
  require(host.ndim() == 5 && host.size(1) == blocks.size(1) && host.size(3) == blocks.size(4) &&
              host.size(4) == blocks.size(5),
          "both tiers must have the same heads, block size and head dimension");
  require(records.ndim() == 4 && records.size(0) == blocks.size(0) && records.size(1) == blocks.size(1) &&
              records.size(2) == slot_of.size(2) &&
              records.size(3) == summary_bytes(summary_format(bits), blocks.size(5)),
          "records must be [S, H, N, R], one for every logical block");
  float* average = nullptr;
  if (averages.has_value()) {
    const TensorView& kept = averages.value();
    require(kept.ndim() == 3 && kept.size(0) == slot_of.size(0) && kept.size(1) == slot_of.size(1) &&
                kept.size(2) == slot_of.size(2),
            "averages must be [S, H, N], one for every logical block");
    average = float_data(kept, "averages must be contiguous float32");
  }
  pipeline_at(handle).add_layer({chunk_pool(host), resident_layer(blocks, head_map, last_selected, slot_of),
                                 {data<uint8_t>(records, "records must be contiguous uint8"), records.size(2),
                                  summary_format(bits), scaling_of(scaling, blocks.size(1), blocks.size(5))},
                                 average});
}

std::shared_ptr<const PipelineStep> pipeline_step(int64_t number, const TensorView& entries, const TensorView& rows,
                                                  const TensorView& candidates, const TensorView& pages) {
  auto step = std::make_shared<PipelineStep>();
  const int64_t count = entries.size(0);
  require(rows.size(0) == count && candidates.size(0) == count, "one row and number of candidates per entry");
  step->number = static_cast<int32_t>(number);
  const auto copy = [count](const TensorView& tensor) {
    const int64_t* first = data<int64_t>(tensor, "entries, rows and candidates must be int64");
    return std::vector<int64_t>(first, first + count);
  };
  step->entries = copy(entries);
  step->rows = copy(rows);
  step->candidates = copy(candidates);
  step->pages_stride = pages.size(1);
  const int32_t* page = data<int32_t>(pages, "pages must be contiguous int32");
  for (const int64_t entry : step->entries)
    step->pages.insert(step->pages.end(), page + entry * step->pages_stride, page + (entry + 1) * step->pages_stride);
  return step;
}

void pipeline_begin_step(int64_t handle, int64_t number, TensorView entries, TensorView rows, TensorView candidates,
                         TensorView pages) {
  pipeline_at(handle).begin_step(pipeline_step(number, entries, rows, candidates, pages));
}

void pipeline_begin_urgent(int64_t handle, int64_t number, TensorView entries, TensorView rows, TensorView candidates,
                           TensorView pages) {
  pipeline_at(handle).begin_urgent(pipeline_step(number, entries, rows, candidates, pages));
}

void pipeline_throttle(int64_t handle, double bytes_per_second) { pipeline_at(handle).throttle(bytes_per_second); }

Queries batch_of(const TensorView& queries) {
  require(queries.ndim() == 4 && queries.stride(3) == 1 && (queries.size(2) == 1 || queries.stride(2) == queries.size(3)),
          "queries must be [n, Q, heads, D] with contiguous vectors");
  return {queries.data_ptr(),  float_dtype(queries), queries.stride(0), queries.stride(1),
          queries.size(1), queries.size(2)};
}

void pipeline_submit(int64_t handle, int64_t layer, TensorView queries, double scale, int64_t cap) {
  pipeline_at(handle).submit(static_cast<int>(layer), batch_of(queries), static_cast<float>(scale), cap);
}

int64_t pipeline_run(int64_t handle, int64_t layer, TensorView queries, double scale, int64_t cap) {
  return pipeline_at(handle).run(static_cast<int>(layer), batch_of(queries), static_cast<float>(scale), cap);
}

void pipeline_wait(int64_t handle, int64_t layer) { pipeline_at(handle).wait(static_cast<int>(layer)); }

// Blocks fetched, blocks deferred, stalls, nanoseconds of stalls, nanoseconds of predict, select and transfer.
tvm::ffi::Array<int64_t> pipeline_counters(int64_t handle) {
  const PipelineCounters c = pipeline_at(handle).counters();
  return {c.fetched, c.deferred, c.stalls, c.stall_ns, c.stage_ns[0], c.stage_ns[1], c.stage_ns[2]};
}

void configure_threads_of(int64_t threads, TensorView cpus) {
  const int64_t* first = data<int64_t>(cpus, "cpus must be contiguous int64");
  configure_threads(static_cast<int>(threads), std::vector<int>(first, first + cpus.size(0)));
}

tvm::ffi::String instruction_set() { return kernels().isa; }

// Those that this machine runs, the fastest first.
tvm::ffi::Array<tvm::ffi::String> instruction_sets() {
  tvm::ffi::Array<tvm::ffi::String> names;
  for (const Kernels* table : runnable_kernels()) names.push_back(table->isa);
  return names;
}

// Reads `bytes` of memory with all threads and returns the sum: what the bandwidth of this machine is measured with.
int64_t read_memory(TensorView words) {
  const int64_t* first = data<int64_t>(words, "words must be contiguous int64");
  constexpr int64_t kWords = 1 << 15;
  std::atomic<int64_t> total{0};
  thread_pool().run((words.size(0) + kWords - 1) / kWords, [&](int64_t task) {
    const int64_t end = std::min<int64_t>(words.size(0), (task + 1) * kWords);
    int64_t sum = 0;
    for (int64_t i = task * kWords; i < end; ++i) sum += first[i];
    total += sum;
  });
  return total;
}

}  // namespace
}  // namespace oasis

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, oasis::paged_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_host_tokens, oasis::store_host_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_resident_tokens, oasis::store_resident_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(summarise, oasis::summarise);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(score_blocks, oasis::score_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(smooth_scores, oasis::smooth_scores);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graduate_blocks, oasis::graduate_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_blocks, oasis::select_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(admit_blocks, oasis::admit_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_create, oasis::pipeline_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_destroy, oasis::pipeline_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_add_layer, oasis::pipeline_add_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_begin_step, oasis::pipeline_begin_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_begin_urgent, oasis::pipeline_begin_urgent);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_throttle, oasis::pipeline_throttle);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_submit, oasis::pipeline_submit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_wait, oasis::pipeline_wait);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_run, oasis::pipeline_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline_counters, oasis::pipeline_counters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(configure_threads, oasis::configure_threads_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(instruction_set, oasis::instruction_set);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(instruction_sets, oasis::instruction_sets);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_memory, oasis::read_memory);
