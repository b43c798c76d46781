"""Encodings of the values (place 4)."""
