"""``python -m megatron_buffer`` is the command ``megatron-buffer``."""

from megatron_buffer.cli import process

if __name__ == '__main__':
    process()
