"""Encodings of queries and keys (place 2)."""
