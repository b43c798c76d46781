"""Find, scale and permute rows of q and k in safetensors files; needs NumPy."""
