"""A checkpoint's files as they are read: configs in any spelling, GGUF, safetensors headers."""
