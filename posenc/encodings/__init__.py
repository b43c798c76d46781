"""Position encodings: their base class, one folder per place, and the registry of names."""
