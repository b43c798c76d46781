"""What encodings compute with: exact frequencies, slopes, dtypes, modes of torch, caches, views."""
