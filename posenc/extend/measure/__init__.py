"""Measure what a checkpoint does with its positions."""
