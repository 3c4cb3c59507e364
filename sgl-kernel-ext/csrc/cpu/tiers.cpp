#include "tiers.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "thread_pool.h"

namespace oasis {
namespace {

constexpr int64_t kTokensPerTask = 64;
constexpr int64_t kPagesPerTask = 16;

void store_vector(const ChunkPool& pool, char* to, const void* from, DType dtype, int64_t offset) {
  if (dtype == pool.dtype) {
    std::memcpy(to, static_cast<const char*>(from) + offset * element_bytes(dtype), pool.vector_bytes());
    return;
  }
  thread_local std::vector<float> converted;
  converted.resize(pool.head_dim);
  kernels().read_vector(dtype, converted.data(), from, offset, pool.head_dim);
  kernels().write_vector(pool.dtype, to, 0, converted.data(), 1.0f, pool.head_dim);
}

float* floats(std::vector<float>& memory, int64_t count) {
  if (memory.size() < static_cast<size_t>(count)) memory.resize(count);
  return memory.data();
}

// Indices of the `wanted` best scores in the order of the blocks.
void top(const float* scores, int64_t candidates, int64_t wanted, std::vector<int32_t>& blocks) {
  thread_local std::vector<uint32_t> keys;
  keys.resize(candidates + 16);
  const uint32_t least = kernels().threshold(scores, candidates, wanted, keys.data());
  int64_t equal = wanted;  // of those that score exactly the threshold, the first ones fill up
  for (int64_t i = 0; i < candidates; ++i) equal -= keys[i] > least;
  blocks.resize(candidates);
  int64_t count = 0;
  for (int64_t i = 0; i < candidates; ++i) {  // no branches: which blocks are best is hard to foresee
    const bool tied = keys[i] == least && equal > 0;
    equal -= tied;
    blocks[count] = static_cast<int32_t>(i);
    count += keys[i] > least || tied;
  }
  blocks.resize(count);
}

}  // namespace

void store_tokens(const ChunkPool& pool, const NewTokens& tokens) {
  const int64_t tasks = (tokens.tokens + kTokensPerTask - 1) / kTokensPerTask;
  thread_pool().run(tasks, [&](int64_t task) {
    const int64_t end = std::min(tokens.tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      const int64_t row = tokens.rows == nullptr ? 0 : tokens.rows[token];
      const int64_t slot = tokens.positions[token] / pool.block_size, offset = tokens.positions[token] % pool.block_size;
      for (int64_t head = 0; head < pool.kv_heads; ++head) {
        char* to = pool.chunk(row, head, slot) + offset * pool.vector_bytes();
        store_vector(pool, to, tokens.keys, tokens.dtype, token * tokens.key_stride + head * pool.head_dim);
        store_vector(pool, to + pool.half_chunk_bytes(), tokens.values, tokens.dtype,
                     token * tokens.value_stride + head * pool.head_dim);
      }
    }
  });
}

void summarise_pages(const ChunkPool& host, const int64_t* pages, int64_t count, const Summaries& beside) {
  const int64_t record = summary_bytes(beside.format, host.head_dim);
  thread_pool().run((count + kPagesPerTask - 1) / kPagesPerTask, [&](int64_t task) {
    thread_local std::vector<float> memory;
    float* scratch = floats(memory, 4 * host.head_dim);
    for (int64_t i = task * kPagesPerTask; i < std::min(count, (task + 1) * kPagesPerTask); ++i)
      for (int64_t head = 0; head < host.kv_heads; ++head)
        kernels().summarise(host.dtype, host.chunk(0, head, pages[i]), host.block_size, host.head_dim, beside.format,
                            beside.scaling.of_head(head), beside.records + (pages[i] * host.kv_heads + head) * record,
                            scratch);
  });
}

void graduate(const ResidentLayer& layer, const int64_t* rows, const int64_t* blocks, const int64_t* local_slots,
              int64_t count, int32_t step) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows[i], block = blocks[i];
    if (block >= layer.selected) continue;
    for (int64_t head = 0; head < layer.blocks.kv_heads; ++head) {
      std::memcpy(layer.blocks.chunk(row, head, block), layer.blocks.chunk(row, head, local_slots[i]),
                  2 * layer.blocks.half_chunk_bytes());
      layer.head_map[layer.map_offset(row, head) + block] = block;
      layer.last_selected[layer.map_offset(row, head) + block] = step;
      layer.slot_of[layer.inverse_offset(row, head) + block] = block;
    }
  }
}

void score_row(const void* queries, DType dtype, int64_t query_stride, int64_t num_queries, int64_t query_heads,
               const ChunkPool& pool, int64_t head, const uint8_t* records, SummaryFormat format, const Scaling& scaling,
               int64_t candidates, float scale, float tightness, float* scores) {
  const int64_t group = query_heads / pool.kv_heads, vectors = num_queries * group, dim = pool.head_dim;
  thread_local std::vector<float> memory;
  float* query = floats(memory, vectors * dim + kernels().score_scratch_floats(vectors, dim, candidates));
  for (int64_t q = 0; q < num_queries; ++q)
    for (int64_t g = 0; g < group; ++g)
      kernels().read_vector(dtype, query + (q * group + g) * dim, queries, q * query_stride + (head * group + g) * dim,
                            dim);
  kernels().score_blocks(
      {query, vectors, dim, records, format, scaling.of_head(head), candidates, scale, tightness, query + vectors * dim,
       scores});
}

void smooth(const Smoothing& smoothing, int64_t candidates, float* averages, float* scores) {
  const float decay = smoothing.decay, share = 1.0f - decay, escape = 1.0f / smoothing.escape;
  for (int64_t i = 0; i < candidates; ++i) {
    const float blended = averages[i] < 0 ? scores[i] : decay * averages[i] + share * scores[i];
    averages[i] = scores[i] = std::max(blended, scores[i] * escape);
  }
}

int64_t select_row(const float* scores, int64_t candidates, const ResidentLayer& layer, int64_t row, int64_t head,
                   int32_t step, int64_t cap, std::vector<Admission>& admissions) {
  thread_local std::vector<int32_t> predicted, missing, oldest;
  top(scores, candidates, std::min(candidates, layer.selected), predicted);
  const int32_t* slot_of = layer.slot_of + layer.inverse_offset(row, head);
  int32_t* last_selected = layer.last_selected + layer.map_offset(row, head);
  missing.clear();
  for (const int32_t block : predicted) {
    if (slot_of[block] >= 0)
      last_selected[slot_of[block]] = step;
    else
      missing.push_back(block);
  }
  const int64_t count = std::min<int64_t>(cap, missing.size());
  admissions.clear();
  if (count == 0) return missing.size();
  std::partial_sort(missing.begin(), missing.begin() + count, missing.end(), [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  oldest.resize(layer.selected);
  for (int64_t slot = 0; slot < layer.selected; ++slot) oldest[slot] = slot;
  std::partial_sort(oldest.begin(), oldest.begin() + count, oldest.end(), [&](int32_t a, int32_t b) {
    return last_selected[a] != last_selected[b] ? last_selected[a] < last_selected[b] : a < b;
  });
  for (int64_t i = 0; i < count; ++i) admissions.push_back({oldest[i], missing[i]});
  return missing.size() - count;
}

void admit(const ResidentLayer& layer, const ChunkPool& host, int64_t row, int64_t head, int64_t page, Admission admission,
           int32_t step) {
  std::memcpy(layer.blocks.chunk(row, head, admission.slot), host.chunk(0, head, page),
              2 * host.half_chunk_bytes());
  int32_t* slot_of = layer.slot_of + layer.inverse_offset(row, head);
  int32_t& held = layer.head_map[layer.map_offset(row, head) + admission.slot];
  slot_of[held] = -1;
  held = admission.block;
  layer.last_selected[layer.map_offset(row, head) + admission.slot] = step;
  slot_of[admission.block] = admission.slot;
}

}  // namespace oasis
