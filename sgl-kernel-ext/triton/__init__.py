"""Triton kernels of a decode step; `sglang_oasis/kernels/triton/sources.py` loads this folder as oasis_triton.

Names in the kernels: H KV heads, G query heads per KV head, D head dimension, B tokens per block, K selected and R
local slots, P = K + R, CHUNK = 2 * B * D elements of K and V of one (block, head), REC bytes of a summary. Offsets into
tiers are 64 bits wide. Memory that a step does not use may hold anything: it is masked, never multiplied by zero.
"""
