"""Between SGLang's objects and ours: attention backends, drafting, sampling, the CPU platform."""
