"""Read a checkpoint's files: configs in any spelling, GGUF, safetensors headers."""
