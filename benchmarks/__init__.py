"""Benchmarks against stock Megatron-Core, both in one run: ``python -m benchmarks NAME [--json F] [--reps N]``."""
