"""What things cost on this machine: `posenc bench`."""
