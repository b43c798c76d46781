"""A report, which every command returns, and its blocks: shown on the terminal, as a page, JSON and
figures."""
