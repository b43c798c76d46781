"""Recipes that several runtimes read alike, and what writes them: configs, GGUF, overrides."""
