// The kernels as the host sees them. Shapes as in sglang_oasis/ops; all tensors are contiguous.
#pragma once

#include <cstdint>

namespace oasis {

constexpr int kLanes = 32, kWarps = 8, kThreads = kWarps * kLanes;  // of a warp, of a thread block

enum class Element : int { kFloat32, kFloat16, kBFloat16 };

// Maps of a layer: [S, H, K], [S, H, K] and [S, H, N].
struct Maps {
  int32_t *head_map, *last_selected, *slot_of;
  int heads, selected, logical_blocks;
};

// [n, H, C] each, -1 where there is none.
struct Admissions {
  int32_t *blocks, *slots;
  int width;
};

struct FetchArgs {
  const unsigned char* host;     // [pages, H, 2, B, D], in host memory that the device reaches by address
  unsigned char* resident;       // [S, H, P, 2, B, D]
  int64_t chunk_bytes;           // of K and V of a block and head, a multiple of 16
  int slots, block_size;         // P, B
  const int32_t* req_to_token;   // [S, context]
  int64_t context;
  Maps maps;
  const int64_t* rows;           // [n]
  int entries;                   // n
  Admissions admissions;
  const int32_t* number;         // [1]
  int offset;
};

// One warp per admission, on `blocks` thread blocks; what went wrong, or nullptr.
const char* fetch_blocks(const FetchArgs& args, int blocks, void* stream);

// Bytes from the start of the dynamic shared memory.
struct SharedLayout {
  int fragments, records, statistics, weights, logits, total;
  int stage_bytes;   // of one stage of `records`, which has a few per warp
  int logits_pitch;  // logits of one query head; the most blocks whose logits fit
};

struct SelectArgs {
  const void* queries;  // [n, Q, H * G, D]
  Element element;      // of the queries
  int num_queries, group, head_dim;
  const unsigned char* records;  // [S, H, N, R]
  int record_bytes;
  const float* scaling;  // [H, 5, D] or nullptr, what summaries are relative to; rows 3 and 4 multiply the queries
  float scale, tightness;
  float* averages;  // [S, H, N] or nullptr
  float decay, fresh, escape;  // fresh = 1 - decay
  int sinks;
  const int64_t* rows;        // [n]
  const int32_t* candidates;  // [n]
  int entries;                // n
  Maps maps;
  const int32_t* number;  // [1]
  int offset;
  const int32_t* cap;  // [1]
  Admissions admissions;
  unsigned long long* counters;  // [2]
  float* scratch;                // [n, H, N]
  SharedLayout layout;           // filled in by fused_select
};

// Whether the queries of a head, their summaries and its K slots fit into the shared memory of the device at hand; of
// the arguments, the queries' shape and dtype and the number of slots count.
bool fused_select_fits(const SelectArgs& args, int bits);

// One thread block per entry and head, with at most `shared_limit` bytes of shared memory (0: what the device has).
const char* fused_select(SelectArgs args, int bits, int shared_limit, void* stream);

}  // namespace oasis
