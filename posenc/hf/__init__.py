"""Hugging Face checkpoints: read, extend, measure and export their positions."""
