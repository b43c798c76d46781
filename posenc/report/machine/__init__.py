"""The machine that a run is on, and what an option says of it."""
