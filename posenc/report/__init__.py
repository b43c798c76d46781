"""Output of every command: pages, drawings, progress, files, errors, facts of the machine."""
