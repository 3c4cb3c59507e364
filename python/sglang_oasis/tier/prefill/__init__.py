"""What prefill passes through on a device."""
