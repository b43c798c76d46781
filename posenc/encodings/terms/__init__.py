"""Terms that encodings add to scores: dense, by distance, in bands."""
