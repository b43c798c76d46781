"""Generated tasks with known answers, which distinguish position encodings."""
