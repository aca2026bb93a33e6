"""The tiny GPT without any buffer, from the package: `megatron_buffer.testing.oracle`."""

from megatron_buffer.testing.oracle import OracleResult, oracle

__all__ = ['OracleResult', 'oracle']
