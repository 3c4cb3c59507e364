"""Serves tiny random models of every decoder architecture and compares them with Hugging Face; see docs/models.md."""
