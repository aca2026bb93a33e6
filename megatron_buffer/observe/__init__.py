"""Watches buffers at work, stock Megatron's and ours by the same code: statistics, traces, metrics.

Off unless a flag or the environment asks for it. Upstream has no counterpart.
"""
