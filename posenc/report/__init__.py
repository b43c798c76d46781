"""What every command shows: a report and its blocks, as a page, on the terminal, JSON, figures."""
