"""What this machine is, by which results differ, and what it has room and time for."""
