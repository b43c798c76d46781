"""One trial in its own process: train, test, and write what it gave."""
