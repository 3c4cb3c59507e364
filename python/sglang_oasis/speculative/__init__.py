"""Speculative algorithms of this package."""
