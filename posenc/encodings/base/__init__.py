"""The base classes of encodings and of what they add to scores, and ways to combine encodings."""
