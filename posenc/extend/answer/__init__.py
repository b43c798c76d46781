"""Show an outcome: in the terminal, on the page, as JSON."""
