"""Say what memory an extension takes, before anything is loaded."""
