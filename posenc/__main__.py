"""python -m posenc: the command line."""

import sys

if not sys.flags.safe_path:
    # -m puts the current folder first: a torch.py that lies beside the user's text would be run.
    # posenc itself is found already, wherever it lies.
    del sys.path[0]

from posenc.cli import main

if __name__ == "__main__":
    main()
