"""What is often said about position encodings, each with the code that measures it."""
