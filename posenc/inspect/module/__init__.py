"""Call and check a position module of another library."""
