#ifdef __x86_64__
#include "args.h"
#pragma GCC target("avx2,fma")
#define OASIS_ISA avx2
#define OASIS_VECTOR_BYTES 32
#include "isa.inc"
#endif
