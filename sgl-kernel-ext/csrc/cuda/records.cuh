// The formats of a block summary (sglang_oasis/ops/summary.py) as operands of a matrix product, and their way to shared
// memory.
//
// Four lanes share a record. The coordinates of a vector lie in units of kUnitBytes; lane t of the four takes units
// [t * n, (t + 1) * n) with n = units_per_lane. A unit makes kSteps operands of four coordinates: a product step takes
// one from each of the four lanes. The order of the coordinates is free so long as the queries follow it.
#pragma once

#include "intrinsics.cuh"
#include "kernels.h"

namespace oasis {

constexpr int kColumns = 8;  // records of one product

__device__ __forceinline__ float bfloat16_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

struct Int4 {
  static constexpr int kBits = 4, kUnitBytes = 4, kSteps = 2, kPadding = 0;
  static constexpr int kTiles = 2;   // products that a warp does at once
  static constexpr int kStages = 3;  // tiles of a warp in shared memory: the one it scores and those on their way

  __device__ static int coordinate(int unit, int step, int i, int dim) {
    return step * dim / 2 + 4 * unit + (i % 2) * 2 + i / 2;
  }

  // 128 + code is a bfloat16 whose low bits are the code; the sign of a midpoint's code goes by an offset of 8.
  __device__ __forceinline__ static void unpack(const unsigned char* from, bool midpoint, uint2 (&out)[kSteps]) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(from) ^ (midpoint ? 0x88888888u : 0u);
    const uint32_t offset = midpoint ? 0x43084308u : 0x43004300u;  // 136, 128
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t low = codes >> 4 * step, high = low >> 8;
      out[step].x = subtract_bfloat16((low & 0x000f000fu) | 0x43004300u, offset);
      out[step].y = subtract_bfloat16((high & 0x000f000fu) | 0x43004300u, offset);
    }
  }
};

struct Int8 {
  static constexpr int kBits = 8, kUnitBytes = 4, kSteps = 1, kPadding = 0, kTiles = 2, kStages = 2;

  __device__ static int coordinate(int unit, int, int i, int) { return 4 * unit + i; }

  // 2^23 + code is a float32 whose low bits are the code; whole numbers up to 256 are bfloat16.
  __device__ __forceinline__ static uint32_t value(uint32_t codes, int i, float offset) {
    return __float_as_uint(__uint_as_float(0x4b000000u | (codes >> 8 * i & 0xffu)) - offset);
  }

  __device__ __forceinline__ static void unpack(const unsigned char* from, bool midpoint, uint2 (&out)[kSteps]) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(from) ^ (midpoint ? 0x80808080u : 0u);
    const float offset = midpoint ? 8388736.0f : 8388608.0f;
    out[0].x = value(codes, 0, offset) >> 16 | (value(codes, 1, offset) & 0xffff0000u);
    out[0].y = value(codes, 2, offset) >> 16 | (value(codes, 3, offset) & 0xffff0000u);
  }
};

struct BFloat16 {
  static constexpr int kBits = 16, kUnitBytes = 16, kSteps = 2, kTiles = 1, kStages = 2;
  static constexpr int kPadding = 16;  // between records in shared memory: their size is a multiple of all its banks

  __device__ static int coordinate(int unit, int step, int i, int) { return 8 * unit + 4 * step + i; }

  __device__ __forceinline__ static void unpack(const unsigned char* from, bool, uint2 (&out)[kSteps]) {
    const uint4 values = *reinterpret_cast<const uint4*>(from);
    out[0] = {values.x, values.y};
    out[1] = {values.z, values.w};
  }
};

template <typename Format>
struct Shape {
  static constexpr int kRecords = kColumns * Format::kTiles;  // of a tile, which a warp stages and scores at once

  int vector_bytes, record_bytes, stride, units, units_per_lane;

  __host__ __device__ explicit Shape(int head_dim)
      : vector_bytes(head_dim * Format::kBits / 8),
        record_bytes(2 * vector_bytes + (Format::kBits < 16 ? 4 : 0)),
        stride(record_bytes + Format::kPadding),
        units(vector_bytes / Format::kUnitBytes),
        units_per_lane((units + 3) / 4) {}

  // Product steps of one vector.
  __host__ __device__ int steps() const { return units_per_lane * Format::kSteps; }
  // A tile as it lies in shared memory, behind up to 12 bytes so that it is aligned as it was in global memory.
  __host__ __device__ int stage_bytes() const { return kRecords * stride + 16; }
};

// Starts to copy `count` records that lie side by side; from 16 bytes to 16 bytes, by words at the ends.
template <typename Format>
__device__ __forceinline__ void stage_records(const Shape<Format>& shape, const unsigned char* from, int count,
                                              unsigned char* stage, int lane) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16), end = shift + count * shape.record_bytes;
  for (int at = 16 * lane; at < end; at += 16 * kLanes) {
    unsigned char* to = stage + at;
    if (Format::kPadding) to += at / shape.record_bytes * Format::kPadding;
    if (at >= shift && at + 16 <= end) {
      copy16_async(to, from + at - shift);
    } else {
      for (int word = 0; word < 16; word += 4)
        if (at + word >= shift && at + word < end) copy4_async(to + word, from + at + word - shift);
    }
  }
}

}  // namespace oasis
