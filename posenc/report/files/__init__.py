"""Atomic files, locks, and records of runs."""
