"""Run the command line: python -m posenc."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C shows no traceback while modules are imported or Python ends."""
    import signal  # not above: a signal.py next to the user's text would run

    try:
        from posenc.command_line import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("posenc: stopped before anything began.\n")
        sys.exit(130)
    try:
        command_line.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    if sys.hexversion < 0x030B0000:
        sys.stderr.write(f"posenc: needs Python 3.11 or newer, this is {sys.version.split()[0]}.\n")
        sys.exit(2)
    if not sys.flags.safe_path:
        # -m puts the current folder first in the path, so a torch.py next to the user's text would
        # run. posenc is already imported.
        del sys.path[0]
    main()
