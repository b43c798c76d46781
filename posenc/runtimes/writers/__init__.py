"""Write what several runtimes read alike: recipes for configs, GGUF files, overrides, weights."""
