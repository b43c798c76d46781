"""An encoding of posenc in a stock model of transformers: attach, run, save, load, detach."""
