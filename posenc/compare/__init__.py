"""Compare: train short, test long, on the user's own text."""
