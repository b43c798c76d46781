"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Figures = Annotated[
    Path | None,
    typer.Option(
        help="Folder for every figure as SVG, PDF and PNG, with its data as CSV.",
        show_default="none",
    ),
]
