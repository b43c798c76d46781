"""`posenc extend` while it runs: text in, progress on stderr, a table, a page."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from posenc.checkpoints.text import split_documents
from posenc.files import write_atomically
from posenc.hf.extension import Outcome, extend
from posenc.hf.options import Options
from posenc.hf.page import by_position_table, write_page

OUT_OF_DOMAIN = (
    "Measured on the source of Python's standard library. Losses on a text unlike the model's "
    "own say little; "
    "give --text with text of its kind."
)


def run(
    folder: Path, to: int, method: str | None, out: Path | None, texts: list[Path],
    options: Options, as_bytes: bool, as_ids: bool, report: Path | None, command: str,
) -> None:  # fmt: skip
    """Extend, and show what came of it. Raises: ValueError for wrong input, before anything is
    written."""
    console = Console(stderr=True)
    caution = None if texts else OUT_OF_DOMAIN
    documents = read_documents(texts)
    with _Narrator(console) as narrate:
        outcome = extend(
            folder,
            to,
            documents,
            method=method,
            out=out,
            options=options,
            as_bytes=as_bytes,
            as_ids=as_ids,
            progress=narrate,
        )
    if caution:
        console.print(caution, markup=False)
    console.print(_table(outcome))
    if "search" in outcome.measured:
        console.print(f"search: {outcome.measured['search'][0].summary}.", markup=False)
    console.print(outcome.reason, markup=False)
    for line in outcome.config_diff:
        console.print(line, markup=False, highlight=False)
    page = report or (out / "extend.html" if out is not None else None)
    if page is not None:
        write_page(outcome, page, command, caution)
        console.print(f"Page: {page}", markup=False)
        write_csv(outcome, page.with_suffix(".csv"))
    if out is not None:
        console.print(f"Written and proved: {out}", markup=False)
    elif method is None:
        console.print(
            f"Nothing was written. To export: {command} --method {outcome.recommended} --out "
            "FOLDER",
            markup=False,
        )


def write_csv(outcome: Outcome, path: Path) -> None:
    """The losses by position beside the page: one row per method and bucket, nats per token."""
    rows = ["method,start,stop,loss,low,high,tokens"]
    for name, evaluation in outcome.evaluations().items():
        buckets = itertools.pairwise(evaluation.edges)
        for (start, stop), e in zip(buckets, evaluation.by_position, strict=True):
            if e.tokens:
                losses = f"{e.mean:.6f},{e.low:.6f},{e.high:.6f}"
                rows.append(f"{name},{start},{stop},{losses},{e.tokens}")
    write_atomically(path, "\n".join(rows) + "\n")


def read_documents(texts: list[Path]) -> list[str]:
    """The documents of the files, or of the embedded corpus where there are none.

    Raises: ValueError for a file that is not there or holds no text.
    """
    if not texts:
        from posenc.corpus import embedded

        return [path.read_text(encoding="utf-8", errors="replace") for _, path in embedded().files]
    documents = []
    for path in texts:
        if not path.is_file():
            raise ValueError(f"{path}: no such file.")
        documents += split_documents(path.read_text(encoding="utf-8", errors="replace"))
    if not documents:
        raise ValueError(f"{', '.join(map(str, texts))}: no text in it.")
    return documents


def _table(outcome: Outcome) -> Table:
    source, named = by_position_table(outcome), outcome.evaluations()
    ends = next(iter(named.values())).edges[1:]
    table = Table(
        title="Perplexity by position: tokens up to", caption="95 % intervals are on the page"
    )
    table.add_column("method", no_wrap=True)
    for end in ends:
        table.add_column(f"{end:,}", justify="right")
    table.add_column("stock tools", justify="right")
    for row, evaluation in zip(source.rows, named.values(), strict=True):
        table.add_row(
            str(row[0]),
            *(f"{e.perplexity:.3g}" if e.tokens else "–" for e in evaluation.by_position),
            str(row[-1]),
        )
    return table


class _Narrator:
    """Progress as a live bar on a terminal, as a line whenever the task changes elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.last, self.said = console, "", 0.0
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console,
            transient=True,             disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=1.0)

    def __enter__(self) -> _Narrator:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def __call__(self, what: str, share: float) -> None:
        self.bar.update(self.task, description=what, completed=share)
        now = time.monotonic()
        if not self.console.is_terminal and what != self.last and now - self.said > 2:
            self.console.print(f"{what} ({share:.0%})", markup=False, highlight=False)
            self.last, self.said = what, now
