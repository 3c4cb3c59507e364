"""A forward pass over the tiers, without SGLang: one contract, an engine driven by the host, one that a device drives itself."""
