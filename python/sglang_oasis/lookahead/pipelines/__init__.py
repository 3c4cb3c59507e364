"""Pipelines that predict, select and transfer blocks beside the forward pass."""
