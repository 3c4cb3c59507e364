"""Connects SGLang's objects with ours: attention backends, drafting, sampling, the CPU platform."""
