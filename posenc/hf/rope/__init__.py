"""A model's rotary settings in its config: read, checked, written, applied to a loaded model."""
