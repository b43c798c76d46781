"""Read, check and write a config's rotary settings, and apply them to a loaded model."""
