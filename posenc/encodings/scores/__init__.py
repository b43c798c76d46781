"""Encodings of the attention scores (place 3)."""
