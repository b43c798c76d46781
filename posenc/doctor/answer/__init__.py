"""Print the doctor's findings: in the terminal, as JSON and as SARIF."""
