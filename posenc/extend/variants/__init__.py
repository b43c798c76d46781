"""The ways to read further that are tried on a checkpoint."""
