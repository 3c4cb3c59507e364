"""The SGLang attention backend: plans batches and calls the tiers. No policy."""
