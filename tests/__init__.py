"""Tests of megatron-buffer; a package, so that rank processes can import test functions by name."""
