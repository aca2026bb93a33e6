"""``param_order: recorded``: the order that a profile file holds."""
