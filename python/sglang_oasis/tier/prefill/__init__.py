"""Staging of host pages on a device for prefill."""
