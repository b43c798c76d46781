"""Attention with an encoding: the function, the module, the cache, the kernels."""
