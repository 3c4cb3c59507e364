"""Builds and launches the kernels, and puts them in the place of the ops' references."""
