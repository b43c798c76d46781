"""Rotate pairs of channels of q and k: in plain operations, or by Triton on CUDA."""
