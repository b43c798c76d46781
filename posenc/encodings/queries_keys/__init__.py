"""Place 2: position enters at queries and keys."""
