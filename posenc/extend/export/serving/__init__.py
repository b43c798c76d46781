"""SERVE.md: how each runtime serves an exported folder, and what it makes of it."""
