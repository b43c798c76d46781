"""Plan the memory of an extension, say whether it fits, and give freed memory back."""
