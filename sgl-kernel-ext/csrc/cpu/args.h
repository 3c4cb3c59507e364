// What the kernels are called with: plain pointers and sizes. Strides are in elements unless a name says bytes.
#pragma once

#include <cstdint>

namespace oasis {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16 };

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Chunks [2, B, D] of K and V, addressed by (row, head, slot). A host pool is the case of one row, whose slots are pages.
struct ChunkPool {
  char* data;
  int64_t row_stride_bytes;
  int64_t head_stride_bytes;
  int64_t slot_stride_bytes;
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_dim;
  DType dtype;

  int64_t vector_bytes() const { return head_dim * element_bytes(dtype); }
  int64_t half_chunk_bytes() const { return block_size * vector_bytes(); }
  char* chunk(int64_t row, int64_t head, int64_t slot) const {
    return data + row * row_stride_bytes + head * head_stride_bytes + slot * slot_stride_bytes;
  }
};

// n sequences; sequence i owns the query tokens [query_starts[i], query_starts[i + 1]) and attends to the first
// kv_lengths[i] tokens of its slots, its own last tokens included, causally.
struct AttentionArgs {
  ChunkPool pool;
  const void* query;  // [T, H * G, D]
  void* out;          // [T, H * G, D], contiguous
  DType query_dtype;
  int64_t query_token_stride;
  int64_t group;
  const int64_t* rows;       // [n]
  const int32_t* slots;      // [n, slots_stride]
  int64_t slots_stride;
  const int32_t* kv_lengths;    // [n]
  const int32_t* query_starts;  // [n + 1]
  int64_t sequences;
  float scale;
};

// One thread's share of an attention call: some query tokens of a sequence, one KV head, some keys.
struct AttentionItem {
  int32_t sequence;
  int32_t head;
  int32_t first_token;  // of the sequence's new tokens
  int32_t last_token;   // one past
  int32_t first_key;
  int32_t last_key;  // one past
  int64_t partial;   // index of the first of its query vectors in the partial results, -1 when it writes `out` itself
};

// Unnormalised results of key ranges, one per query vector: sum of exp(score - maximum) * V, and the sum of the weights.
struct Partials {
  float* values;   // [P, D]
  float* maximum;  // [P]
  float* sum;      // [P]
};

enum class SummaryFormat : int32_t { kBFloat16, kInt8, kInt4 };

constexpr int64_t summary_bytes(SummaryFormat format, int64_t head_dim) {
  switch (format) {
    case SummaryFormat::kBFloat16:
      return 4 * head_dim;
    case SummaryFormat::kInt8:
      return 2 * head_dim + 4;
    default:
      return head_dim + 4;
  }
}

// What the summaries of one head are relative to, five vectors of D floats (sglang_oasis/ops/summary.py); null for
// midpoints and half ranges as they are.
struct Scaling {
  const float* vectors;
  int64_t head_dim;

  explicit operator bool() const { return vectors != nullptr; }
  Scaling of_head(int64_t head) const { return {vectors ? vectors + head * 5 * head_dim : nullptr, head_dim}; }
  const float* zero() const { return vectors; }
  const float* inverse_spread() const { return vectors + head_dim; }
  const float* inverse_reach() const { return vectors + 2 * head_dim; }
  const float* spread() const { return vectors + 3 * head_dim; }
  const float* reach() const { return vectors + 4 * head_dim; }
};

// Scores the blocks of one (row, head): softmax per query vector of scale * (q @ midpoint + |q| @ half_range * tightness)
// over `blocks` records, then the mean over the query vectors. A scaling's zero is left out: it adds the same to all.
struct ScoreArgs {
  const float* query;  // [M, D]
  int64_t vectors;     // M
  int64_t head_dim;
  const uint8_t* records;  // [blocks, R]
  SummaryFormat format;
  Scaling scaling;
  int64_t blocks;
  float scale;
  float tightness;
  float* scratch;  // as many as score_scratch_floats says
  float* scores;   // [blocks]
};

}  // namespace oasis
