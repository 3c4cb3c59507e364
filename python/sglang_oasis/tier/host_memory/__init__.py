"""Memory of the host: what is free, pinned, near a device."""
