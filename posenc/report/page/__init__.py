"""Pages, tables and figures for reports, and lines for the terminal."""
