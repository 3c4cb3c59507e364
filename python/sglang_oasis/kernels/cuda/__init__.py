"""The CUDA C++ kernels."""
