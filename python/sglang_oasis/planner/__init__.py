"""Capacity planner: what lookahead KV gives a model on a GPU, computed from the model's and the GPU's data sheet.

    python -m sglang_oasis.planner --model Qwen3-8B --gpu h100 --context 32768

See docs/planner.md.
"""
