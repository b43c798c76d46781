"""Run the command line: python -m posenc."""

import sys

if not sys.flags.safe_path:
    # -m puts the current folder first in the path, so a torch.py next to the user's text would run.
    # posenc is already imported.
    del sys.path[0]

from posenc.cli import main

if __name__ == "__main__":
    main()
