#ifdef __x86_64__
#include <immintrin.h>
#include "args.h"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")
#define OASIS_ISA avx512bf16
#define OASIS_VECTOR_BYTES 64
#define OASIS_BF16_DOT
#include "isa.inc"
#endif
