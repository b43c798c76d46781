"""Check a foreign module: each check returns whether it holds, and the numbers."""
