"""Scalings of RoPE's frequencies for contexts longer than in training.

Each is a frozen dataclass with one formula. `registry` lists them, `scaling` has what all share,
and `lookup` finds them by their names.
"""
