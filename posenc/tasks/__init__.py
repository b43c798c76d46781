"""Tasks with known answers, made on the fly, that tell position encodings apart."""
