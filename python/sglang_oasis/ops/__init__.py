"""Typed interfaces of the kernels: each op has a plain-torch reference and may have one implementation per device."""
