"""Stands for a training script in tests of sweeps: writes the statistics of all ranks, without torch.

What an arm does shows in the figures: its config in the layout and the time, its flags in the loss.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--train-iters', type=int, default=5)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--shift', type=float, default=0.0, help='added to every loss')
    parser.add_argument('--slower', type=float, default=1.0, help='factor of step times')
    parser.add_argument('--jitter', action='store_true', help='losses that no repeat gives again')
    parser.add_argument('--behave', default='well')
    parser.add_argument('--started', type=Path, help='file that gets a line when a run starts')
    parser.add_argument('--wait-for', type=Path, help='file that must be there before it goes on')
    parser.add_argument('--use-custom-buffer', action='store_true')
    parser.add_argument('--custom-buffer-cpu', action='store_true')
    parser.add_argument('--custom-buffer-config')
    parser.add_argument('--custom-buffer-stats', type=Path, required=True)
    options = parser.parse_args()
    if options.started is not None:
        with options.started.open('a') as file:
            file.write(f'{options.custom_buffer_stats.parent.name}\n')
    if options.behave == 'raise':
        raise ValueError('the loss is NaN')
    if options.behave == 'assert':
        assert options.seed < 0
    if options.behave == 'refuse':
        sys.stderr.write('megatron-buffer: error: padding.high_busbw: contradicts a flag\n')
        sys.exit(2)
    if options.behave == 'die':
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)
    if options.behave == 'hang' or options.wait_for is not None:
        child = subprocess.Popen(
            [sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True
        )
        options.custom_buffer_stats.parent.joinpath('pids').write_text(f'{child.pid}\n')
        while options.behave == 'hang' or not options.wait_for.exists():
            time.sleep(0.02)
        child.kill()
        child.wait()
    for rank in range(options.ranks):
        write_rank(options, rank)


def write_rank(options: argparse.Namespace, rank: int) -> None:
    ours = options.use_custom_buffer and options.behave != 'ignores our flags'
    config = hash_of_config = None
    buckets = 4
    if ours:
        from megatron_buffer.config import config_hash, load_config

        config = load_config(options.custom_buffer_config)
        hash_of_config = config_hash(config)
        buckets = getattr(config.bucketing, 'num_buckets', buckets)
    noise = random.Random(options.seed if not options.jitter else None)
    pace = random.Random(f'{options.custom_buffer_stats}')
    run = {
        'kind': 'run',
        'schema': 1,
        'rank': rank,
        'world_size': options.ranks,
        'buffer': 'megatron_buffer' if ours else 'stock',
        'config_hash': hash_of_config,
        'config_source': options.custom_buffer_config,
        'config': None,
        'versions': {
            'python': '3',
            'torch': '2',
            'megatron_core': '0.19.2',
            'megatron_buffer': '0.1',
        },
        'device': 'cpu',
    }
    layout = {
        'kind': 'layout',
        'chunk': 'pp0/vp0',
        'bucket_groups': buckets,
        'buffers': [
            {
                'param_dtype': 'bfloat16',
                'grad_dtype': 'float32',
                'is_expert': False,
                'dp_size': options.ranks,
                'elems': 1024,
                'padding_elems': 24,
                'buckets': buckets,
                'bucket_elems': [1024 // buckets] * buckets,
            }
        ],
    }
    lines = [run, layout]
    done = options.train_iters - (2 if options.behave == 'short' else 0)
    for step in range(1, done + 1):
        time_s = 0.01 * options.slower * pace.uniform(0.99, 1.01)
        traffic = {'count': buckets, 'bytes': 2048, 'payload_bytes': 4096}
        lines.append(
            {
                'kind': 'step',
                'step': step,
                'time_s': None if step == 1 else time_s + 0.0001 * rank,
                'loss': {'lm loss': 5 / step + noise.random() / 100 + options.shift},
                'grad_norm': float('nan') if options.behave == 'nan' else 1.0 / step,
                'update_successful': True,
                'exposed_grad_s': 0.001 * options.slower,
                'exposed_param_s': 0.0005,
                'collectives': {'reduce_scatter': traffic, 'all_gather': traffic},
                'peak_memory_bytes': 10_000_000 + rank,
            }
        )
    if options.behave != 'no end':
        lines.append({'kind': 'end', 'steps': done})
    options.custom_buffer_stats.mkdir(parents=True, exist_ok=True)
    path = options.custom_buffer_stats / f'rank-{rank}.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


if __name__ == '__main__':
    main()
