"""Rotate pairs of channels of q and k, by torch operations or by Triton on CUDA."""
