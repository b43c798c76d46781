"""Encodings of the embeddings (place 1)."""
