"""What a reader sees: the page, figures, tables on the terminal, progress, events."""
