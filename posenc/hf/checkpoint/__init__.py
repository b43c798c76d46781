"""A folder of Hugging Face, loaded without running code of it: its files, its model, its text."""
