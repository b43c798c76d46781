"""What is checked of a foreign module: each check gives whether it holds, and the numbers."""
