"""Place 4: position enters at the values."""
