"""Print the doctor's findings: in the terminal and as JSON."""
