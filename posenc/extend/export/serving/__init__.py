"""Write SERVE.md: how each runtime serves an exported folder, and what it computes from it."""
