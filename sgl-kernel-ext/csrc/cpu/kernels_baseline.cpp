// Whatever the compiler targets by default: SSE2 on x86-64, NEON on arm64.
#define OASIS_ISA baseline
#define OASIS_VECTOR_BYTES 16
#include "isa.inc"
