"""`posenc inspect package.module:Class`: measure and print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.markup import escape

from posenc.inspect.module.sheet import build, find_form, verdicts
from posenc.report.console import print_table, stdout
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
    words = {True: "yes", False: "no", None: "–"}
    rows = [(verdict.check, words[verdict.holds], verdict.measured) for verdict in found]
    title = escape(f"{path}, called as {form.name}")
    print_table(stdout(140), ("check", "holds", "measured"), rows, title=title)
