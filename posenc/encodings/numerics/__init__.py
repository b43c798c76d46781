"""Numbers that encodings compute with: frequencies, biases, angles, dtypes, copies per device."""
