"""What a position encoding is, and all of them."""
