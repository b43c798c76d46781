"""Print the doctor's findings: in the terminal, as JSON, as SARIF, and the page of all rules."""
