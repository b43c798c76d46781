"""Run the command line (`main.py`), and give all commands options, progress and exit codes."""
