"""A trained model's folder in Hugging Face's format: load it, read its positions, read its text."""
