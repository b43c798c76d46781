"""The engines give what a local run gives."""
