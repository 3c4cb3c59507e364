"""Sampling parameters of a request: penalties, seeds, verification of drafts by sampling."""
