"""Search a checkpoint's own frequencies."""
