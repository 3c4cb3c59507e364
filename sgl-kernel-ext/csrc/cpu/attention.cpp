#include "attention.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace oasis {
namespace {

constexpr int64_t kVectorsPerItem = 64;
constexpr int64_t kKeysPerItem = 1024;  // of sequences with few queries
// Scores (keys times query vectors) below which waking other threads takes longer than doing the work.
constexpr int64_t kScoresWorthThreads = 1 << 15;

// Query vectors whose results wait to be merged: `ranges` groups of `vectors`, one group per key range.
struct Merge {
  int64_t first_partial;
  int64_t vectors;
  int64_t ranges;
  int64_t first_query_token;
  int64_t head;
};

struct Plan {
  std::vector<AttentionItem> items;
  std::vector<Merge> merges;
  int64_t partials = 0;
  int64_t scores = 0;
};

// Work in pieces of similar cost, a sequence's longest first. Few queries (decode, short suffixes) are split by keys, so
// that even one long sequence occupies every thread; the split depends on nothing but the sequence itself.
Plan divide(const AttentionArgs& args) {
  Plan plan;
  const int64_t tile = std::max<int64_t>(1, kVectorsPerItem / args.group);
  for (int64_t sequence = 0; sequence < args.sequences; ++sequence) {
    const int64_t tokens = args.query_starts[sequence + 1] - args.query_starts[sequence];
    const int64_t length = args.kv_lengths[sequence];
    const bool split = tokens <= tile && length > kKeysPerItem;
    for (int64_t last = tokens; last > 0; last -= tile) {
      const int64_t first = std::max<int64_t>(0, last - tile);
      const int64_t visible = std::max<int64_t>(0, length - (tokens - last));
      const int64_t ranges = split ? (visible + kKeysPerItem - 1) / kKeysPerItem : 1;
      const int64_t vectors = (last - first) * args.group;
      for (int64_t head = 0; head < args.pool.kv_heads; ++head) {
        if (split) plan.merges.push_back({plan.partials, vectors, ranges, args.query_starts[sequence] + first, head});
        for (int64_t range = 0; range < ranges; ++range) {
          const int64_t first_key = range * kKeysPerItem;
          const int64_t last_key = split ? std::min(visible, first_key + kKeysPerItem) : visible;
          plan.items.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(head), static_cast<int32_t>(first),
                                static_cast<int32_t>(last), static_cast<int32_t>(first_key),
                                static_cast<int32_t>(last_key), split ? plan.partials : -1});
          if (split) plan.partials += vectors;
          plan.scores += (last_key - first_key) * vectors;
        }
      }
    }
  }
  return plan;
}

// Memory of this thread that outlives the call: it is touched again and again, and never given back.
template <int kUse>
char* scratch(int64_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < static_cast<size_t>(bytes) + 64) memory.resize(bytes + 64);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
}

}  // namespace

void attention(const AttentionArgs& args) {
  const Plan plan = divide(args);
  const int64_t dim = args.pool.head_dim;
  auto* memory = reinterpret_cast<float*>(scratch<0>(plan.partials * (dim + 2) * sizeof(float)));
  const Partials partials{memory, memory + plan.partials * dim, memory + plan.partials * (dim + 1)};
  const int64_t bytes = kernels().attention_scratch_bytes(std::max(kVectorsPerItem, args.group), dim);
  const auto attend = [&](int64_t i) { kernels().attend(args, plan.items[i], partials, scratch<1>(bytes)); };
  const int64_t items = plan.items.size();
  if (plan.scores < kScoresWorthThreads)
    for (int64_t i = 0; i < items; ++i) attend(i);
  else
    thread_pool().run(items, attend);
  const int64_t query_heads = args.pool.kv_heads * args.group;
  for (const Merge& merge : plan.merges) {
    for (int64_t vector = 0; vector < merge.vectors; ++vector) {
      const int64_t token = merge.first_query_token + vector / args.group;
      const int64_t head = merge.head * args.group + vector % args.group;
      kernels().merge(args, partials, merge.first_partial + vector, merge.ranges, merge.vectors,
                      (token * query_heads + head) * dim);
    }
  }
}

}  // namespace oasis
