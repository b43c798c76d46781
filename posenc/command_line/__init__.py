"""What all commands share but their reports: options, progress, and errors with exit codes."""
