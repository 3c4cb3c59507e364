"""Trains the EAGLE-3 head of the reference model on a CPU: `python -m scripts.eagle3.collect`, then `.train`."""
