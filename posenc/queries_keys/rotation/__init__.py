"""What every rotary method does to q and k, and its kernels."""
