// Scores of one (row, head): ops/summary.block_scores, then ops/smoothing.smooth_scores, then the sinks.
#pragma once

#include <cmath>

#include "kernels.h"
#include "records.cuh"

namespace oasis {

constexpr int kRows = 16;  // query heads of one product

__host__ __device__ inline int query_heads(const SelectArgs& args) { return args.num_queries * args.group; }
__host__ __device__ inline int row_tiles(const SelectArgs& args) { return (query_heads(args) + kRows - 1) / kRows; }

// bfloat16 terms that add up to a query's element; to that times the scaling only with float32 queries.
__host__ __device__ inline int query_terms(Element element) {
  return element == Element::kBFloat16 ? 1 : element == Element::kFloat16 ? 2 : 3;
}

__device__ __forceinline__ float load_query(const SelectArgs& args, int64_t at) {
  if (args.element == Element::kFloat32) return static_cast<const float*>(args.queries)[at];
  const uint16_t bits = static_cast<const uint16_t*>(args.queries)[at];
  return args.element == Element::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

// Nearest bfloat16, half to even; in the high half of a word, as a float32.
__device__ __forceinline__ uint32_t round_to_bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
}

// Term `term` of query head `row` (of its magnitude in the second vector) at a coordinate, 0 where there is none.
template <typename Format>
__device__ uint32_t query_term(const SelectArgs& args, const Shape<Format>& shape, int entry, int head, int row,
                               int vector, int unit, int step, int i, int term) {
  if (row >= query_heads(args) || unit >= shape.units) return 0;
  const int64_t query = static_cast<int64_t>(entry) * args.num_queries + row / args.group;
  const int64_t place = (query * args.maps.heads + head) * args.group + row % args.group;
  const int coordinate = Format::coordinate(unit, step, i, args.head_dim);
  float rest = load_query(args, place * args.head_dim + coordinate);
  if (vector == 1) rest = fabsf(rest);
  if (args.scaling) rest *= args.scaling[(head * 5 + 3 + vector) * args.head_dim + coordinate];
  for (; term > 0; --term) rest -= __uint_as_float(round_to_bfloat16(rest));
  return round_to_bfloat16(rest) >> 16;
}

// The queries as operands: [row tile, vector, step, term, lane].
template <typename Format>
__device__ void prepare_queries(const SelectArgs& args, const Shape<Format>& shape, int entry, int head, uint4* out) {
  const int terms = query_terms(args.element);
  const int count = row_tiles(args) * 2 * shape.steps() * terms * kLanes;
  for (int at = threadIdx.x; at < count; at += kThreads) {
    const int lane = at % kLanes, term = at / kLanes % terms, step = at / kLanes / terms % shape.steps();
    const int vector = at / kLanes / terms / shape.steps() % 2, tile = at / kLanes / terms / shape.steps() / 2;
    const int unit = lane % 4 * shape.units_per_lane + step / Format::kSteps;
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int row = tile * kRows + lane / 4 + word % 2 * 8;
      uint32_t pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        pair[i] = query_term(args, shape, entry, head, row, vector, unit, step % Format::kSteps, word / 2 * 2 + i, term);
      words[word] = pair[0] | pair[1] << 16;
    }
    out[at] = {words[0], words[1], words[2], words[3]};
  }
}

// sums [tile of columns] += queries @ one vector of the records of a tile.
template <typename Format>
__device__ __forceinline__ void multiply_vector(const Shape<Format>& shape, const unsigned char* records, bool midpoint,
                                                const uint4* queries, int terms, int lane,
                                                float (&sums)[Format::kTiles][4]) {
  const int first = lane % 4 * shape.units_per_lane;
  const unsigned char* mine = records + lane / 4 * shape.stride + (midpoint ? 0 : shape.vector_bytes);
  for (int unit = 0; unit < shape.units_per_lane; ++unit) {
    // Beyond the last unit the queries are 0: any unit of the vector will do.
    const int at = min(first + unit, shape.units - 1) * Format::kUnitBytes;
    uint2 operands[Format::kTiles][Format::kSteps];
#pragma unroll
    for (int tile = 0; tile < Format::kTiles; ++tile)
      Format::unpack(mine + tile * kColumns * shape.stride + at, midpoint, operands[tile]);
#pragma unroll
    for (int step = 0; step < Format::kSteps; ++step)
#pragma unroll 1
      for (int term = 0; term < terms; ++term) {
        const uint4 query = queries[((unit * Format::kSteps + step) * terms + term) * kLanes + lane];
#pragma unroll
        for (int tile = 0; tile < Format::kTiles; ++tile) multiply_add(sums[tile], query, operands[tile][step]);
      }
  }
}

// Logits of a lane: [i][j] is that of row lane / 4 + j / 2 * 8 of the row tile and record column_of(lane, i, j).
template <typename Format>
using Logits = float[Format::kTiles][4];

__device__ __forceinline__ int column_of(int lane, int i, int j) { return i * kColumns + lane % 4 * 2 + j % 2; }

template <typename Format>
__device__ __forceinline__ void score_tile(const SelectArgs& args, const Shape<Format>& shape,
                                           const unsigned char* records, const uint4* queries, int lane,
                                           Logits<Format>& logits) {
  const int terms = query_terms(args.element);
  float ranges[Format::kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < Format::kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) logits[i][j] = 0;
  multiply_vector(shape, records, true, queries, terms, lane, logits);
  multiply_vector(shape, records, false, queries + shape.steps() * terms * kLanes, terms, lane, ranges);
#pragma unroll
  for (int i = 0; i < Format::kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float midpoint = logits[i][j], range = ranges[i][j] * args.tightness;
      if (Format::kBits < 16) {
        const unsigned char* scales = records + column_of(lane, i, j) * shape.stride + 2 * shape.vector_bytes;
        const uint32_t both = *reinterpret_cast<const uint32_t*>(scales);
        midpoint *= bfloat16_to_float(both & 0xffffu);
        range *= bfloat16_to_float(both >> 16);
      }
      logits[i][j] = (midpoint + range) * args.scale;
    }
}

// Calls consume(first record, row tile, logits) for every tile of the records and of the queries. A warp reads its
// tiles ahead; blocks that are no candidates have any logits.
template <typename Format, typename Consume>
__device__ __forceinline__ void scan_records(const SelectArgs& args, const unsigned char* records, int candidates,
                                             unsigned char* shared, Consume&& consume) {
  constexpr int kRecords = Shape<Format>::kRecords, kStride = kWarps * kRecords;
  const Shape<Format> shape(args.head_dim);
  const auto* queries = reinterpret_cast<const uint4*>(shared + args.layout.fragments);
  const int queries_of_tile = 2 * shape.steps() * query_terms(args.element) * kLanes;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  unsigned char* stages = shared + args.layout.records + warp * Format::kStages * args.layout.stage_bytes;
  const auto stage = [&](int first, int at) {
    if (first < candidates)
      stage_records(shape, records + static_cast<int64_t>(first) * shape.record_bytes, min(kRecords, candidates - first),
                    stages + at % Format::kStages * args.layout.stage_bytes, lane);
    copy_commit();
  };
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(records) % 16);  // that of every tile
  constexpr int kAhead = Format::kStages - 1;
  for (int i = 0; i < kAhead; ++i) stage((warp + i * kWarps) * kRecords, i);
  int at = 0;
  for (int first = warp * kRecords; first < candidates; first += kStride, ++at) {
    stage(first + kAhead * kStride, at + kAhead);
    copy_wait<kAhead>();
    __syncwarp();
    for (int tile = 0; tile < row_tiles(args); ++tile) {
      Logits<Format> logits;
      score_tile(args, shape, stages + at % Format::kStages * args.layout.stage_bytes + shift,
                 queries + tile * queries_of_tile, lane, logits);
      consume(first, tile, logits);
    }
    __syncwarp();
  }
}

// Largest logit and sum of exponentials of each query head over the tiles of each warp; keeps the logits if there is
// memory for them.
template <typename Format>
__device__ void reduce_logits(const SelectArgs& args, const unsigned char* records, int candidates,
                              unsigned char* shared, bool keep) {
  auto* statistics = reinterpret_cast<float2*>(shared + args.layout.statistics);
  auto* kept = reinterpret_cast<float*>(shared + args.layout.logits);
  const int lane = threadIdx.x % kLanes, rows = row_tiles(args) * kRows;
  for (int i = threadIdx.x; i < kWarps * rows; i += kThreads) statistics[i] = {-INFINITY, 0};
  __syncthreads();
  float2* mine = statistics + threadIdx.x / kLanes * rows;
  scan_records<Format>(args, records, candidates, shared, [&](int first, int tile, Logits<Format>& logits) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * kRows + lane / 4 + half * 8;
      float largest = -INFINITY, sum = 0;
#pragma unroll
      for (int i = 0; i < Format::kTiles; ++i)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) {
          const int block = first + column_of(lane, i, j);
          if (block >= candidates) logits[i][j] = -INFINITY;
          else if (keep && row < query_heads(args)) kept[row * args.layout.logits_pitch + block] = logits[i][j];
          largest = fmaxf(largest, logits[i][j]);
        }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float2 before = mine[row];
      largest = fmaxf(largest, before.x);
#pragma unroll
      for (int i = 0; i < Format::kTiles; ++i)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) sum += __expf(logits[i][j] - largest);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) mine[row] = {largest, sum + before.y * __expf(before.x - largest)};
      __syncwarp();
    }
  });
  __syncthreads();
}

// Of each query head the largest logit, and what makes an exponential a share of the mean of softmaxes.
__device__ inline void combine_statistics(const SelectArgs& args, unsigned char* shared) {
  const auto* statistics = reinterpret_cast<const float2*>(shared + args.layout.statistics);
  auto* weights = reinterpret_cast<float2*>(shared + args.layout.weights);
  const int rows = row_tiles(args) * kRows;
  for (int row = threadIdx.x; row < query_heads(args); row += kThreads) {
    float largest = -INFINITY, sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, statistics[warp * rows + row].x);
    for (int warp = 0; warp < kWarps; ++warp) {
      const float2 part = statistics[warp * rows + row];
      sum += part.y * __expf(part.x - largest);
    }
    weights[row] = {largest, 1.0f / (sum * query_heads(args))};
  }
  __syncthreads();
}

// Reads the records again: softmax per query head and its mean, where the logits do not fit.
template <typename Format>
__device__ void score_again(const SelectArgs& args, const unsigned char* records, int candidates, unsigned char* shared,
                            float* scores) {
  const auto* weights = reinterpret_cast<const float2*>(shared + args.layout.weights);
  const int lane = threadIdx.x % kLanes;
  float means[Format::kTiles][2];
  scan_records<Format>(args, records, candidates, shared, [&](int first, int tile, Logits<Format>& logits) {
#pragma unroll
    for (int i = 0; i < Format::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < 2 && tile == 0) means[i][j] = 0;
        const int row = tile * kRows + lane / 4 + j / 2 * 8;
        if (row < query_heads(args)) means[i][j % 2] += __expf(logits[i][j] - weights[row].x) * weights[row].y;
      }
    if (tile + 1 < row_tiles(args)) return;
#pragma unroll
    for (int i = 0; i < Format::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float mean = means[i][j];
        for (int distance = 4; distance < kLanes; distance *= 2) mean += __shfl_xor_sync(~0u, mean, distance);
        const int block = first + column_of(lane, i, j);
        if (lane < 4 && block < candidates) scores[block] = mean;
      }
  });
  __syncthreads();
}

__device__ __forceinline__ float smooth(const SelectArgs& args, float* average, float score) {
  const float old = *average;
  const float blended = old < 0 ? score : args.decay * old + args.fresh * score;
  return *average = fmaxf(blended, score / args.escape);
}

// Scores of the candidates of a row and head: in shared memory, or in `scratch` where the logits do not fit.
template <typename Format>
__device__ float* score_blocks(const SelectArgs& args, int entry, int head, int64_t line, int candidates,
                               unsigned char* shared) {
  const unsigned char* records = args.records + line * args.maps.logical_blocks * args.record_bytes;
  const int64_t scratch_line = static_cast<int64_t>(entry) * args.maps.heads + head;
  const bool keep = candidates <= args.layout.logits_pitch;
  auto* logits = reinterpret_cast<float*>(shared + args.layout.logits);
  float* scores = keep ? logits : args.scratch + scratch_line * args.maps.logical_blocks;  // over the first row
  prepare_queries(args, Shape<Format>(args.head_dim), entry, head,
                  reinterpret_cast<uint4*>(shared + args.layout.fragments));
  reduce_logits<Format>(args, records, candidates, shared, keep);
  combine_statistics(args, shared);
  if (!keep) score_again<Format>(args, records, candidates, shared, scores);
  const auto* weights = reinterpret_cast<const float2*>(shared + args.layout.weights);
  for (int block = threadIdx.x; block < candidates; block += kThreads) {
    float score = keep ? 0 : scores[block];
    if (keep)
      for (int row = 0; row < query_heads(args); ++row)
        score += __expf(logits[row * args.layout.logits_pitch + block] - weights[row].x) * weights[row].y;
    if (args.averages) score = smooth(args, args.averages + line * args.maps.logical_blocks + block, score);
    scores[block] = block < args.sinks ? INFINITY : score;
  }
  __syncthreads();
  return scores;
}

}  // namespace oasis
