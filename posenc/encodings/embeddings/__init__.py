"""Place 1: position enters at the embeddings."""
