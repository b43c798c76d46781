"""Inspect what a trained model does with position: its structure, its attention, its words
exchanged."""
