"""A small reference Transformer that any encoding fits."""
