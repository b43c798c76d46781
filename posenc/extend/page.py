"""The page of an extension: what each method does to every position, before and after."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from posenc.extend import figures
from posenc.extend.extension import Outcome
from posenc.extend.measure.intervals import Estimate
from posenc.extend.task_table import task_rows
from posenc.extend.variants.variant import Variant
from posenc.report.page import Caution, Cell, Code, Facts, Headline, Page, Table

NO_EXTENSION = "no extension"
OUR_RUNTIME = "needs our runtime"
TASKS = (
    "Share of prompts answered exactly, with a 95 % Wilson interval over all depths, and the loss "
    "of the answer; and by how much the perplexity of short texts, read by themselves, changed, "
    "with a 95 % interval over documents"
)
INEXACT = "yes, but its cache is inexact"


def write_extension_page(outcome: Outcome, path: Path, command: str, caution: str | None) -> None:
    """Write extend.html. `caution` says what the reader must know about the text that was
    measured."""
    checkpoint = outcome.checkpoint
    page = Page(
        f"{checkpoint.folder.name}: {checkpoint.trained_length} to {outcome.target} tokens",
        "Position methods measured on the same text",
    )
    page.section("", Headline(outcome.reason), *([Caution(caution)] if caution else []))
    page.section("Perplexity by position", by_position_table(outcome))
    tried = {name: variant.summary for name, (variant, _) in outcome.measured.items()}
    page.section("What was tried", Facts({k: v for k, v in tried.items() if v}))
    if outcome.failed:
        page.section("What could not be measured on this model", Facts(outcome.failed))
    page.section("Curves", *figures.curves(outcome))
    if outcome.measured["none"][0].settings:
        page.section("Frequencies", *figures.frequencies(outcome))
    page.section("Passkeys", *(list(figures.passkeys(outcome)) or ["Not measured."]))
    header, rows = task_rows(outcome)
    if rows:
        page.section("Tasks and short texts", Table(header, rows, TASKS))
    if outcome.proof is not None:
        proof = outcome.proof
        facts = {
            "largest relative error of a frequency": f"{proof.inv_freq_error:.1e}",
            "largest difference of a logit": f"{proof.logits_error:.1e}",
            "step-by-step decoding against one pass": f"{proof.decode_error:.1e}",
            "tokens generated past the old length": proof.generated,
        }
        page.section(
            "Export, read back by stock transformers in a fresh process", Facts(facts),
            "What changed in config.json:", Code("\n".join(outcome.config_diff)),
        )  # fmt: skip
    page.section("Repeat it", Code(command))
    page.write(path)


def by_position_table(outcome: Outcome) -> Table:
    """Perplexity in each bucket of positions, with its 95 % interval."""
    edges = next(iter(outcome.evaluations().values())).edges
    header = [
        "method",
        *(f"{a}–{b}" for a, b in itertools.pairwise(edges)),
        "loads in stock tools",
    ]
    rows = []
    for name, evaluation in outcome.evaluations().items():
        cells = [_with_interval(e) for e in evaluation.by_position]
        variant = outcome.measured[name][0] if name in outcome.measured else None
        rows.append([name, *cells, loads(variant)])
    return Table(header, rows, "Perplexity per token; in brackets a 95 % interval over documents")


def _with_interval(e: Estimate) -> Cell | str:
    if not e.tokens:
        return Cell("cannot", note="Its table of positions has no rows there.")
    return f"{e.perplexity:.2f} ({math.exp(min(e.low, 50)):.2f}–{math.exp(min(e.high, 50)):.2f})"


def loads(variant: Variant | None) -> str:
    """Whether stock tools load a variant, in words."""
    if variant is not None and variant.window is not None:
        return NO_EXTENSION
    if variant is None or (variant.cache_safe and not variant.needs_runtime):
        return "yes"
    return OUR_RUNTIME if variant.needs_runtime else INEXACT
