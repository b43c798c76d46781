"""The methods of extending that are tried on a checkpoint."""
