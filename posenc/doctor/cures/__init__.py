"""Copies that runtimes read as meant: of configs, GGUF files, LoRA adapters, and layouts."""
