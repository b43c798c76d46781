"""Recipes that several runtimes read alike, and what writes them: configs, weights, GGUF files,
command-line overrides."""
