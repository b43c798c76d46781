"""Terms that encodings add to scores: a number per pair, or products with vectors by distance."""
