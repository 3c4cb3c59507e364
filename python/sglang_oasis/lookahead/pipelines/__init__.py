"""Predict, select and transfer, beside the forward pass."""
