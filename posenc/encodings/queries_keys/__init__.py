"""Position encodings that act at queries and keys, place 2 of 4."""
