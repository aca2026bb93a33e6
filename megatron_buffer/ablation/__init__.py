"""``megatron-buffer ablate`` and ``report``: sweeps over configs and flags, and what came out of them.

``sweep`` says what a sweep is, ``read_sweep`` reads one from YAML, ``plan`` lists its runs, ``runner`` and
``keeper`` run them, ``store`` keeps them, ``stats_files`` reads what the ranks of a run wrote;
``compare`` and ``judge`` say what it means, ``report*`` show it. None of them imports torch or megatron.
Upstream has no counterpart.
"""
