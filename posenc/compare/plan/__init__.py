"""What will be trained, what it costs, and what is refused."""
