"""`posenc inspect claims`: measure and print."""

from __future__ import annotations

import json

from posenc.inspect.claims.sheet import Checked, check
from posenc.report.progress import tell


def run(as_json: bool) -> None:
    """Print every claim with source, measurement and verdict."""
    groups = check(lambda claim: tell(f"measuring: {claim}"))
    tell("")
    found = [c for claims in groups.values() for c in claims]
    if as_json:
        print(json.dumps([c.to_json() for c in found], indent=1, ensure_ascii=False))
    else:
        _print(found)


def _print(found: list[Checked]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("claim", "verdict", "measured", "source", show_lines=True)
    for c in found:
        table.add_row(*map(escape, (c.claim, c.verdict, c.measured, c.source)))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
