"""Load a Hugging Face folder without running its code: files, model, text."""
