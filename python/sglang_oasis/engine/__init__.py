"""A forward pass over the tiers, without SGLang: one contract, driven by the host or by the device itself."""
