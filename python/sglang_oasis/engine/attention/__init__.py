"""What attends on a device."""
