"""Builds and launches the kernels, and registers them as implementations of the ops."""
