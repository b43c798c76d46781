"""Position encodings that act at the attention scores, place 3 of 4."""
