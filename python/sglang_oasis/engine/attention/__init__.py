"""The attention kernels of a device."""
