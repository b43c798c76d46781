"""Position encodings that act at the embeddings, place 1 of 4."""
