"""Numbers of encodings: frequencies, biases, angles; rules for dtypes, heads and devices."""
