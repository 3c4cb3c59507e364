// Loads admitted blocks from host memory into resident slots and updates the maps (ops/eviction.admit_blocks).
#include "intrinsics.cuh"
#include "kernels.h"

namespace oasis {
namespace {

constexpr int kInFlight = 8;  // loads of a lane before its first store: the way to the host is long

__device__ __forceinline__ void copy_chunk(const uint4* from, uint4* to, int64_t vectors, int lane) {
  for (int64_t first = lane; first < vectors; first += kLanes * kInFlight) {
    uint4 held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kLanes < vectors) held[i] = load_once(from + first + i * kLanes);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kLanes < vectors) to[first + i * kLanes] = held[i];
  }
}

__global__ void __launch_bounds__(kThreads) fetch_blocks_kernel(const FetchArgs args) {
  const Maps& maps = args.maps;
  const int lane = threadIdx.x % kLanes;
  const int64_t most = static_cast<int64_t>(args.entries) * maps.heads * args.admissions.width;
  for (int64_t i = blockIdx.x * kWarps + threadIdx.x / kLanes; i < most; i += gridDim.x * kWarps) {
    const int block = args.admissions.blocks[i], slot = args.admissions.slots[i];
    if (block < 0) continue;
    const int64_t head = i / args.admissions.width % maps.heads;
    const int64_t row = args.rows[i / args.admissions.width / maps.heads];
    const int64_t token = args.req_to_token[row * args.context + static_cast<int64_t>(block) * args.block_size];
    const int64_t page = token / args.block_size, lines = row * maps.heads + head;
    const auto* from = reinterpret_cast<const uint4*>(args.host + (page * maps.heads + head) * args.chunk_bytes);
    auto* to = reinterpret_cast<uint4*>(args.resident + (lines * args.slots + slot) * args.chunk_bytes);
    copy_chunk(from, to, args.chunk_bytes / 16, lane);
    if (lane == 0) {
      int32_t* slot_of = maps.slot_of + lines * maps.logical_blocks;
      const int64_t held = lines * maps.selected + slot;
      const int evicted = maps.head_map[held];
      if (evicted >= 0) slot_of[evicted] = -1;
      slot_of[block] = slot;
      maps.head_map[held] = block;
      maps.last_selected[held] = 2 * args.number[0] + args.offset;
    }
  }
}

}  // namespace

const char* fetch_blocks(const FetchArgs& args, int blocks, void* stream) {
  return launch(fetch_blocks_kernel, blocks, kThreads, 0, stream, args);
}

}  // namespace oasis
