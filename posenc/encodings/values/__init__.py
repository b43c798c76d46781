"""Position encodings that act at the values, place 4 of 4."""
