"""What a reader sees of any job: pages, tables, figures, lines of the terminal."""
