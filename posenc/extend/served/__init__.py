"""Ask a running server the tasks, so that what is measured is what is served."""
