"""Attach one of posenc's encodings to a stock model of transformers; run, save, load, detach it."""
