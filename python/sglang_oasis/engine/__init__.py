"""Forward passes over the tiers, without SGLang: one contract and two engines, driven by the host or by the device."""
