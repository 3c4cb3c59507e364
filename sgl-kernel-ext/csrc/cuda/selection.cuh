// The K best blocks of a (row, head) against what is resident: ops/eviction.select_blocks.
#pragma once

#include "kernels.h"
#include "records.cuh"

namespace oasis {

constexpr int kIndexBits = 24, kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr uint32_t kIndexMask = (1u << kIndexBits) - 1;

// Larger is better: by the score, equal scores in the order of the blocks. 56 bits.
__device__ __forceinline__ uint64_t rank_key(float score, int block) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<uint64_t>(ordered) << kIndexBits | (kIndexMask - static_cast<uint32_t>(block));
}

__device__ __forceinline__ int block_of(uint64_t key) {
  return static_cast<int>(kIndexMask - static_cast<uint32_t>(key & kIndexMask));
}

// Of a histogram the largest digit with at least `wanted` at or above it, by one warp: {digit, those above it}.
__device__ inline int2 digit_of(const int* histogram, int wanted, int lane) {
  constexpr int kPerLane = kDigits / kLanes;
  const int top = kDigits - 1 - lane * kPerLane;  // lane 0 has the largest digits
  int own = 0;
  for (int i = 0; i < kPerLane; ++i) own += histogram[top - i];
  int through = own;
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int other = __shfl_up_sync(~0u, through, distance);
    if (lane >= distance) through += other;
  }
  const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, through >= wanted))) - 1;
  int digit = top, above = through - own;
  while (lane == owner && above + histogram[digit] < wanted) above += histogram[digit--];
  return {__shfl_sync(~0u, digit, owner), __shfl_sync(~0u, above, owner)};
}

// The key at or above which there are exactly `wanted` of the keys of blocks [0, count), digit by digit.
__device__ inline uint64_t best_threshold(const float* scores, int count, int wanted) {
  __shared__ int histogram[kDigits];
  __shared__ int2 found;
  uint64_t prefix = 0, mask = 0;
  for (int shift = 32 + kIndexBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) histogram[i] = 0;
    __syncthreads();
    for (int block = threadIdx.x; block < count; block += kThreads) {
      const uint64_t key = rank_key(scores[block], block);
      if ((key & mask) == prefix) atomicAdd(&histogram[key >> shift & (kDigits - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < kLanes) {
      const int2 digit = digit_of(histogram, wanted, threadIdx.x);
      if (threadIdx.x == 0) found = digit;
    }
    __syncthreads();
    prefix |= static_cast<uint64_t>(found.x) << shift;
    mask |= static_cast<uint64_t>(kDigits - 1) << shift;
    wanted -= found.y;
    const bool all = histogram[found.x] == wanted;
    __syncthreads();
    if (all) break;
  }
  return prefix;
}

// Marks the resident ones of the best blocks, and admits the best missing over the least recently selected slots.
//
// `missing` and `ages`, of K elements, are in shared memory.
__device__ inline void select_admissions(const SelectArgs& args, const float* scores, int candidates, int64_t line,
                                         int64_t admission_line, uint64_t* missing, int32_t* ages) {
  __shared__ int num_missing;
  const Maps& maps = args.maps;
  const int32_t* slot_of = maps.slot_of + line * maps.logical_blocks;
  int32_t* last_selected = maps.last_selected + line * maps.selected;
  const int now = 2 * args.number[0] + args.offset;
  if (threadIdx.x == 0) num_missing = 0;
  for (int slot = threadIdx.x; slot < maps.selected; slot += kThreads) ages[slot] = last_selected[slot];
  const uint64_t threshold = best_threshold(scores, candidates, min(maps.selected, candidates));
  for (int block = threadIdx.x; block < candidates; block += kThreads) {
    const uint64_t key = rank_key(scores[block], block);
    if (key < threshold) continue;
    const int slot = slot_of[block];
    if (slot >= 0) {
      ages[slot] = last_selected[slot] = now;
    } else {
      missing[atomicAdd(&num_missing, 1)] = key;
    }
  }
  __syncthreads();

  const int width = args.admissions.width, absent = num_missing;
  const int admitted = min(absent, max(0, min(args.cap[0], width)));
  int32_t* blocks = args.admissions.blocks + admission_line * width;
  int32_t* slots = args.admissions.slots + admission_line * width;
  for (int i = threadIdx.x; i < absent; i += kThreads) {
    int rank = 0;
    for (int other = 0; other < absent; ++other) rank += missing[other] > missing[i];
    if (rank < admitted) blocks[rank] = block_of(missing[i]);
  }
  for (int slot = threadIdx.x; admitted > 0 && slot < maps.selected; slot += kThreads) {
    int rank = 0;
    for (int other = 0; other < maps.selected; ++other)
      rank += ages[other] < ages[slot] || (ages[other] == ages[slot] && other < slot);
    if (rank < admitted) slots[rank] = slot;
  }
  for (int i = admitted + threadIdx.x; i < width; i += kThreads) blocks[i] = slots[i] = -1;
  if (threadIdx.x == 0 && admitted > 0) atomicAdd(&args.counters[0], static_cast<unsigned long long>(admitted));
  if (threadIdx.x == 0 && absent > admitted)
    atomicAdd(&args.counters[1], static_cast<unsigned long long>(absent - admitted));
}

}  // namespace oasis
