// The inner loops, one table per instruction set, and the choice of one.
#pragma once

#include "args.h"

#define OASIS_JOIN_(a, b) a##b
#define OASIS_JOIN(a, b) OASIS_JOIN_(a, b)
#define OASIS_STRING_(a) #a
#define OASIS_STRING(a) OASIS_STRING_(a)

namespace oasis {

struct Kernels {
  const char* isa;
  int64_t (*attention_scratch_bytes)(int64_t rows, int64_t head_dim);
  void (*attend)(const AttentionArgs&, const AttentionItem&, const Partials&, char* scratch);
  void (*merge)(const AttentionArgs&, const Partials&, int64_t first, int64_t ranges, int64_t stride, int64_t out_offset);
  void (*read_vector)(DType, float* to, const void* from, int64_t offset, int64_t head_dim);
  void (*write_vector)(DType, void* to, int64_t offset, const float* from, float factor, int64_t head_dim);
  void (*summarise)(DType, const void* keys, int64_t block_size, int64_t head_dim, SummaryFormat, const Scaling&,
                    uint8_t* record, float* scratch);
  int64_t (*score_scratch_floats)(int64_t vectors, int64_t head_dim, int64_t blocks);
  void (*score_blocks)(const ScoreArgs&);
  uint32_t (*threshold)(const float* scores, int64_t count, int64_t wanted, uint32_t* keys);
};

extern const Kernels kernels_baseline;
#ifdef __x86_64__
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512bf16;
#endif

// The fastest table that this machine runs, or the one that SGLANG_OASIS_CPU_ISA names.
const Kernels& kernels();

}  // namespace oasis
