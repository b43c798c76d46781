"""Turn pairs of channels of q and k: in plain operations, and by Triton on CUDA."""
