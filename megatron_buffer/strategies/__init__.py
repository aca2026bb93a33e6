"""The choices that a config can make, one module per axis.

Each module starts with the small protocol of its axis, then the ``upstream`` strategy, then the
others. Layout strategies (grouping, order, bucketing, isolation, padding, bucket groups, scaling) are
pure functions of sizes and flags; runtime strategies act on a bucket group or a buffer handed to them.
"""
