"""The upstream-diffable reference: each upstream symbol beside what stands for it here, and why it differs.

``mapping/*.yaml`` says which piece of ours stands for which upstream symbol and what kind each difference
is; the sources of both sides are read when they are shown, and none of upstream's is kept here. Imports
neither torch nor megatron. Upstream has no counterpart.
"""
