"""`posenc inspect package.module:Class`: measure and print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from posenc.inspect.module.sheet import build, find_form, verdicts
from posenc.report.progress import tell


def run(path: str, arguments: Sequence[str], as_json: bool) -> None:
    """Print how the module is called, and a verdict for each check."""
    tell(f"measuring {path}")
    module = build(path, arguments)
    form = find_form(module, arguments)
    found = verdicts(module, form)
    tell("")
    if as_json:
        checks = [dataclasses.asdict(verdict) for verdict in found]
        print(json.dumps({"module": path, "called_as": form.name, "checks": checks}, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "holds", "measured", title=escape(f"{path}, called as {form.name}"))
    for verdict in found:
        holds = {True: "yes", False: "no", None: "–"}[verdict.holds]
        table.add_row(escape(verdict.check), holds, escape(verdict.measured))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)
