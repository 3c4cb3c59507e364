// One layer of the two tiers, and what a step does to them between two attention calls.
#pragma once

#include <cstdint>
#include <vector>

#include "args.h"

namespace oasis {

// New tokens [T, H, D] of K and V, and where they go: row and slot * B + offset in the pool.
struct NewTokens {
  const void* keys;
  const void* values;
  DType dtype;
  int64_t key_stride;
  int64_t value_stride;
  const int64_t* rows;  // null: all in row 0
  const int64_t* positions;
  int64_t tokens;
};

void store_tokens(const ChunkPool& pool, const NewTokens& tokens);

// Summaries beside host pages [N_pages, H, R], and of rows [S, H, N, R].
struct Summaries {
  uint8_t* records;
  int64_t blocks;  // N, 1 beside host pages
  SummaryFormat format;
  Scaling scaling;  // of all heads
};

void summarise_pages(const ChunkPool& host, const int64_t* pages, int64_t count, const Summaries& beside);

// One layer of the resident tier: S rows, H heads, K selected and R local slots, N logical blocks.
struct ResidentLayer {
  ChunkPool blocks;        // [S, H, K + R, 2, B, D]
  int32_t* head_map;       // [S, H, K]
  int32_t* last_selected;  // [S, H, K]
  int32_t* slot_of;        // [S, H, N]
  int64_t selected;        // K
  int64_t logical_blocks;  // N

  int64_t map_offset(int64_t row, int64_t head) const { return (row * blocks.kv_heads + head) * selected; }
  int64_t inverse_offset(int64_t row, int64_t head) const { return (row * blocks.kv_heads + head) * logical_blocks; }
};

// Keeps blocks that leave the local slots, where there is room; block b then lives in slot b.
void graduate(const ResidentLayer& layer, const int64_t* rows, const int64_t* blocks, const int64_t* local_slots,
              int64_t count, int32_t step);

// Scores of the blocks of one row and head: see ScoreArgs.
void score_row(const void* queries, DType dtype, int64_t query_stride, int64_t num_queries, int64_t query_heads,
               const ChunkPool& pool, int64_t head, const uint8_t* records, SummaryFormat format, const Scaling& scaling,
               int64_t candidates, float scale, float tightness, float* scores);

// Replaces the scores of one row and head by their averages over the steps, and remembers those. Negative averages are
// not known yet. An average is never below score / escape.
struct Smoothing {
  float decay;
  float escape;
};
void smooth(const Smoothing& smoothing, int64_t candidates, float* averages, float* scores);

struct Admission {
  int32_t slot;
  int32_t block;
};

// Delta selection and capped eviction of one row and head (OasisKV Algorithm 2): of the K best blocks, those that are
// resident are marked as selected in `step`; of the others, at most `cap`, the best first, are paired with the slots
// that were selected least recently. Returns how many blocks are neither resident nor admitted.
int64_t select_row(const float* scores, int64_t candidates, const ResidentLayer& layer, int64_t row, int64_t head,
                   int32_t step, int64_t cap, std::vector<Admission>& admissions);

// Loads a block from its host page over a resident slot.
void admit(const ResidentLayer& layer, const ChunkPool& host, int64_t row, int64_t head, int64_t page, Admission admission,
           int32_t step);

}  // namespace oasis
