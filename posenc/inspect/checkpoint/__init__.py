"""Inspect what a trained model does with position: its structure, its attention, and what
exchanging two words changes."""
