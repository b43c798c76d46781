"""Plan a comparison: trials to train, their cost, and refusals."""
