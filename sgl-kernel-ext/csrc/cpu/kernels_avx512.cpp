#ifdef __x86_64__
#include "args.h"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#define OASIS_ISA avx512
#define OASIS_VECTOR_BYTES 64
#include "isa.inc"
#endif
