"""Rows of q and k in safetensors files: found, scaled, permuted in place; needs NumPy."""
