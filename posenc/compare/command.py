"""`posenc compare`. torch is imported when it runs."""

import inspect
from typing import Any

from posenc.compare.options import Options


def compare(**options: Any) -> None:
    """Train each encoding short, test it long, and recommend one.

    The same command resumes an interrupted one and skips finished trials.
    """
    from posenc.compare import run_sizes

    run_sizes.run(Options(**options))


# typer makes the command's options from the signature.
compare.__signature__ = inspect.signature(Options, eval_str=True)  # type: ignore[attr-defined]
