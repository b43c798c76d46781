"""Check what is often said about position encodings, each claim with the code that measures it."""
