"""SGLang on a CPU: the platform, and the speculative ops that SGLang has for GPUs only."""
