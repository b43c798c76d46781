"""A study for readers and programs: page, tables on the terminal, figures, JSON, CSV."""
