"""Exact numbers: frequencies, biases, angles, precision, heads, copies on devices."""
