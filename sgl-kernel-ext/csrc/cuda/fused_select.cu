// Scores the blocks of a (row, head) from their summaries and chooses what to load over which slots, in one kernel.
#include "intrinsics.cuh"
#include "scores.cuh"
#include "selection.cuh"

namespace oasis {
namespace {

template <typename Format>
__global__ void __launch_bounds__(kThreads, 1) fused_select_kernel(const SelectArgs args) {
  const int entry = blockIdx.x / args.maps.heads, head = blockIdx.x % args.maps.heads;
  const int candidates = min(args.candidates[entry], args.maps.logical_blocks);
  const int width = args.admissions.width;
  if (candidates <= 0) {
    for (int i = threadIdx.x; i < width; i += kThreads)
      args.admissions.blocks[blockIdx.x * width + i] = args.admissions.slots[blockIdx.x * width + i] = -1;
    return;
  }
  unsigned char* shared = dynamic_shared();
  const int64_t line = args.rows[entry] * args.maps.heads + head;
  const float* scores = score_blocks<Format>(args, entry, head, line, candidates, shared);
  auto* missing = reinterpret_cast<uint64_t*>(shared + args.layout.records);  // no longer needed
  auto* ages = reinterpret_cast<int32_t*>(missing + args.maps.selected);
  select_admissions(args, scores, candidates, line, blockIdx.x, missing, ages);
}

constexpr int aligned(int bytes) { return (bytes + 15) / 16 * 16; }

// Blocks whose logits fit: what the rest leaves of the limit, and no more than all blocks need. Eight beyond a multiple of
// the 32 banks, so that neighbouring rows are written without conflicts.
int logits_pitch(int room, int blocks) {
  constexpr int kBanks = 32, kOff = 8;
  if (room < kOff) return 0;
  return min((room - kOff) / kBanks, (blocks - kOff + kBanks - 1) / kBanks) * kBanks + kOff;
}

template <typename Format>
SharedLayout shared_layout(const SelectArgs& args, int limit) {
  const Shape<Format> shape(args.head_dim);
  const int rows = row_tiles(args) * kRows;
  SharedLayout layout{};
  layout.stage_bytes = shape.stage_bytes();
  layout.fragments = 0;
  layout.records = row_tiles(args) * 2 * shape.steps() * query_terms(args.element) * kLanes * 16;
  const int selection = args.maps.selected * static_cast<int>(sizeof(uint64_t) + sizeof(int32_t));
  layout.statistics = layout.records + aligned(max(kWarps * Format::kStages * layout.stage_bytes, selection));
  layout.weights = layout.statistics + kWarps * rows * static_cast<int>(sizeof(float2));
  layout.logits = layout.weights + rows * static_cast<int>(sizeof(float2));
  const int row_bytes = query_heads(args) * static_cast<int>(sizeof(float));
  layout.logits_pitch = logits_pitch((limit - layout.logits) / row_bytes, args.maps.logical_blocks);
  layout.total = layout.logits + layout.logits_pitch * row_bytes;
  return layout;
}

template <typename Format>
const char* launch_fused_select(SelectArgs args, int shared_limit, void* stream) {
  args.layout = shared_layout<Format>(args, shared_limit);
  if (args.layout.total > shared_limit)
    return "the queries of a head, their summaries and its K slots do not fit into the shared memory";
  return launch(fused_select_kernel<Format>, args.entries * args.maps.heads, kThreads, args.layout.total, stream, args);
}

constexpr int kStatic = 2048;  // more than what the kernel declares besides, which counts towards the limit too

// Bytes of shared memory for everything but the logits.
int least_shared(const SelectArgs& args, int bits) {
  if (bits == Int4::kBits) return shared_layout<Int4>(args, 0).logits;
  if (bits == Int8::kBits) return shared_layout<Int8>(args, 0).logits;
  return shared_layout<BFloat16>(args, 0).logits;
}

}  // namespace

bool fused_select_fits(const SelectArgs& args, int bits) {
  return least_shared(args, bits) <= shared_memory_limit() - kStatic;
}

const char* fused_select(SelectArgs args, int bits, int shared_limit, void* stream) {
  const int device_limit = shared_memory_limit() - kStatic;
  const int limit = shared_limit > 0 && shared_limit < device_limit ? shared_limit : device_limit;
  if (bits == Int4::kBits) return launch_fused_select<Int4>(args, limit, stream);
  if (bits == Int8::kBits) return launch_fused_select<Int8>(args, limit, stream);
  return launch_fused_select<BFloat16>(args, limit, stream);
}

}  // namespace oasis
