"""Speculative algorithms and the choice of drafts."""
