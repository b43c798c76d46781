"""Write recipes that several runtimes read alike: configs, GGUF files, overrides."""
