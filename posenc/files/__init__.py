"""Read files that a stranger may have written, and write so that nothing is lost."""
