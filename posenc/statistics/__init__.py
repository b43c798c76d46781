"""Confidence intervals: of differences from few seeds, of means over texts, of medians."""
