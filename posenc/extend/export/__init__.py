"""Write the folder, and prove it."""
