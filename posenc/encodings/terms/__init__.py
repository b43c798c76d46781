"""What place 3 adds to scores: dense, by distance, in bands."""
