"""Files that are written whole or not at all, locks, and records of runs."""
