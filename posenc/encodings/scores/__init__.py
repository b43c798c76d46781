"""Place 3: position enters at the attention scores."""
