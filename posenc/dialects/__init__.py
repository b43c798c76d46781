"""Emulate what each runtime computes from a checkpoint's position settings; read and write configs.

Nothing here loads torch or transformers. A config takes milliseconds.
"""
