"""Confidence intervals of differences between encodings from few seeds, and of means over texts."""
