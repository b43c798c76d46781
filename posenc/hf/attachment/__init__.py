"""Attach posenc's encodings to models of transformers; run, save, load and detach them."""
