"""Host memory: how much is free, how it is pinned, which of it is near a device."""
