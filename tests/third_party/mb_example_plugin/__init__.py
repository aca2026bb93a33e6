"""Strategies for megatron-buffer, written from docs/third_party.md alone."""
