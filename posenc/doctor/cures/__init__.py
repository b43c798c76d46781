"""Write copies that runtimes read as meant: configs, GGUF files, LoRA adapters, layouts."""
