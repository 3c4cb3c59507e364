"""Reports on the cost of the GPU kernels, from compilers and from counted bytes."""
