// Runs the CUDA kernels on a CPU, so that tests can compare them with their references where there is no GPU.
//
// Blocks run one after the other, see fibers.h for their threads; what the lanes of a warp do together is a barrier of
// its fibers. Shared memory is NaN at first, and so is what copies asynchronously until copy_wait.
#pragma once
#define OASIS_INTRINSICS_CUH  // in the place of csrc/cuda/intrinsics.cuh

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct int2 { int x, y; };
struct float2 { float x, y; };

namespace oasis {

using std::max;
using std::min;

constexpr int kMostShared = 227 * 1024;  // of a block on sm_90

template <typename Args>
const char* launch(void (*kernel)(Args), int blocks, int threads, int shared_bytes, void*, const Args& args) {
  if (shared_bytes > kMostShared) return "too much shared memory";
  machine.shared = std::vector<unsigned char>(shared_bytes);
  machine.kernel = [=] { kernel(args); };
  blockDim = {static_cast<unsigned>(threads)};
  gridDim = {static_cast<unsigned>(blocks)};
  for (int block = 0; block < blocks; ++block) {
    blockIdx = {static_cast<unsigned>(block)};
    machine.backwards = block % 2;
    run_block(threads);
  }
  return nullptr;
}

inline int shared_memory_limit() { return kMostShared; }
inline unsigned char* dynamic_shared() { return machine.shared.data(); }
inline void __syncthreads() { meet(machine.barrier, machine.alive); }

inline Warp& warp() { return machine.warps[machine.current / kWarpSize]; }
inline int lane() { return machine.current % kWarpSize; }
inline void __syncwarp() { meet(warp().barrier, warp().alive); }

// Publishes a value to the warp; returns those of all lanes, valid until the lane's next but one exchange.
template <typename T>
auto& exchange(const T& value) {
  static_assert(sizeof(T) <= sizeof(warp().words[0][0]));
  auto& words = warp().words[warp().exchanges++ / kWarpSize % 2];
  std::memcpy(words[lane()], &value, sizeof(T));
  __syncwarp();
  return words;
}

template <typename T>
T of_lane(const uint64_t (&words)[kWarpSize][6], int lane) {
  T value;
  std::memcpy(&value, words[lane], sizeof(T));
  return value;
}

template <typename T>
T __shfl_sync(unsigned, T value, int source) { return of_lane<T>(exchange(value), source % kWarpSize); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) { return of_lane<T>(exchange(value), lane() ^ mask); }
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int source = lane() - distance;
  return of_lane<T>(exchange(value), source < 0 ? lane() : source);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  auto& words = exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < kWarpSize; ++i) bits |= static_cast<unsigned>(of_lane<bool>(words, i)) << i;
  return bits;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}

inline float __uint_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t __float_as_uint(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __expf(float x) { return std::exp(x); }
inline float float16_to_float(uint16_t bits) { _Float16 x; std::memcpy(&x, &bits, 2); return static_cast<float>(x); }

inline uint32_t subtract_bfloat16(uint32_t a, uint32_t b) {
  const float low = __uint_as_float(a << 16) - __uint_as_float(b << 16);
  const float high = __uint_as_float(a & 0xffff0000u) - __uint_as_float(b & 0xffff0000u);
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);  // exact for what the kernels subtract
}

inline void multiply_add(float (&c)[4], uint4 a, uint2 b) {
  struct Operands { uint4 a; uint2 b; };
  auto& words = exchange(Operands{a, b});
  const int group = lane() / 4, pair = lane() % 4 * 2;
  const auto sum = [](uint32_t x, uint32_t y) {
    return __uint_as_float(x << 16) * __uint_as_float(y << 16) +
           __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
  };
  for (int t = 0; t < 4; ++t) {
    const uint4 rows = of_lane<Operands>(words, group * 4 + t).a;
    for (int column = 0; column < 2; ++column) {
      const uint2 other = of_lane<Operands>(words, (pair + column) * 4 + t).b;
      c[column] += sum(rows.x, other.x) + sum(rows.z, other.y);
      c[column + 2] += sum(rows.y, other.x) + sum(rows.w, other.y);
    }
  }
}

inline uint4 load_once(const uint4* from) {
  machine.bytes_read += sizeof(uint4);
  return *from;
}

inline void copy_async(void* shared, const void* global, int size) {
  if (reinterpret_cast<uintptr_t>(shared) % size || reinterpret_cast<uintptr_t>(global) % size) std::abort();
  Fiber& fiber = machine.fibers[machine.current];
  fiber.copies.push_back({shared, {}, size, fiber.copy_group});
  std::memcpy(fiber.copies.back().bytes, global, size);
  std::memset(shared, 0xff, size);
  machine.bytes_read += size;
}
inline void copy16_async(void* shared, const void* global) { copy_async(shared, global, 16); }
inline void copy4_async(void* shared, const void* global) { copy_async(shared, global, 4); }
inline void copy_commit() { ++machine.fibers[machine.current].copy_group; }

template <int kPending>
void copy_wait() {
  Fiber& fiber = machine.fibers[machine.current];
  std::vector<PendingCopy> rest;
  for (const PendingCopy& copy : fiber.copies) {
    if (copy.group >= fiber.copy_group - kPending) rest.push_back(copy);
    else std::memcpy(copy.to, copy.bytes, copy.size);
  }
  fiber.copies.swap(rest);
}

}  // namespace oasis
