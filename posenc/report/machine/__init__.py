"""The machine of a run, and options of commands."""
