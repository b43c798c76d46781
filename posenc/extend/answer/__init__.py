"""Build an outcome's report, its figures and its facts."""
