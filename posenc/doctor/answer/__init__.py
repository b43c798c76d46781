"""What the doctor says: in the terminal, as JSON, as SARIF, and the page of all rules."""
