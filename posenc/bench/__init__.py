"""Measure what encodings cost on this machine: `posenc bench`."""
