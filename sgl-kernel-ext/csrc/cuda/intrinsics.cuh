// The only file with PTX and launch syntax: what the kernels take from the hardware and C++ cannot say.
// test/cuda_on_cpu replaces it, by way of its include guard, to run the same kernels on a CPU.
#ifndef OASIS_INTRINSICS_CUH
#define OASIS_INTRINSICS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace oasis {

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char oasis_dynamic_shared[];
  return oasis_dynamic_shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Global to shared memory without registers, past the first-level cache; both addresses are multiples of 16.
__device__ __forceinline__ void copy16_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void copy4_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Memory that is read once: leave the first-level cache to others.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// c [16, 8] += a [16, 16] @ b [16, 8], bfloat16 in, float32 out. With g = lane / 4 and t = lane % 4, of the sixteen
// products of a sum a lane supplies four: a.x and a.z are those of row g, a.y and a.w of row g + 8, b of column g.
// c has row g, columns 2t and 2t + 1, then row g + 8.
__device__ __forceinline__ void multiply_add(float (&c)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Two bfloat16 in a word.
__device__ __forceinline__ uint32_t subtract_bfloat16(uint32_t a, uint32_t b) {
  const __nv_bfloat162 difference =
      __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

__device__ __forceinline__ float float16_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// Most dynamic shared memory of a block; 0 where the device cannot be asked.
inline int shared_memory_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return 0;
  return bytes;
}

// Puts a kernel on the stream; what went wrong, or nullptr.
template <typename Args>
const char* launch(void (*kernel)(Args), int blocks, int threads, int shared_bytes, void* stream, const Args& args) {
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 48 * 1024)  // more has to be asked for
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace oasis

#endif
