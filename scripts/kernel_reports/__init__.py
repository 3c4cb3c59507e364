"""What the kernels for GPUs cost, as compilers and counting tell."""
