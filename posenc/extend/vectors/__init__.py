"""Models without a head: measured by the vectors that they make of texts."""
