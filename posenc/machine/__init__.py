"""The facts of this machine that decide results, and what it has room and time for."""
