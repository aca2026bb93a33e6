"""``python -m megatron_buffer`` is the command ``megatron-buffer``."""

import sys

from megatron_buffer.cli import main

if __name__ == '__main__':
    sys.exit(main())
