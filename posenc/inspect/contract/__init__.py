"""The contract of encodings, as a report."""
