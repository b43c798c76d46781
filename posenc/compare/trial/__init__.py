"""Run one trial in its own process: train, test, and write the result."""
