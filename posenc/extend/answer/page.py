"""Build the page of an extension: what each method does at every position, before and after."""

import itertools
import math

from posenc.extend.answer import figures
from posenc.extend.answer.task_table import task_rows
from posenc.extend.extension import Outcome
from posenc.extend.measure.intervals import Estimate
from posenc.extend.variants.variant import Variant
from posenc.report.page.page import Caution, Code, Facts, Headline, Page
from posenc.report.page.table import Cell, Heading, Table

NO_EXTENSION = "no extension"
OUR_RUNTIME = "needs our runtime"
TASKS = (
    "Fraction of prompts answered exactly, with a 95 % Wilson interval over all depths, and the "
    "loss of the answer. Last: the change of perplexity on short texts, read by themselves, with a "
    "95 % interval over documents"
)
INEXACT = "yes, but its cache is inexact"


def make_page(outcome: Outcome, command: str, caution: str | None) -> Page:
    """Build the page. caution: a warning about the measured text."""
    checkpoint = outcome.checkpoint
    page = Page(
        f"{checkpoint.folder.name}: {checkpoint.trained_length:,} to {outcome.target:,} tokens",
        f"Methods of extending a model from {checkpoint.trained_length:,} tokens to "
        f"{outcome.target:,}, measured on the same text.",
    )
    page.section(
        "",
        Headline(outcome.reason),
        *([Caution(caution)] if caution else []),
        "The loss is in nats: one nat less divides the perplexity by 2.7.",
    )
    page.section(
        "Perplexity by position",
        "Perplexity is the exponential of the loss: 1 is certain, lower is better. Up to "
        f"{checkpoint.trained_length:,} tokens it shows what a method costs within the training "
        "length, beyond them what it gains.",
        by_position_table(outcome),
    )
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
        padded = proof.padding_error
        facts = {
            "largest relative error of a frequency": f"{proof.inv_freq_error:.1e}",
            "largest difference of a logit": f"{proof.logits_error:.1e}",
            "step-by-step decoding against one pass": f"{proof.decode_error:.1e}",
            "rows of a padded batch against each by itself": (
                "not compared" if padded is None else f"{padded:.1e}"
            ),
            "tokens generated past the old length": proof.generated,
        }
        page.section(
            "Export, read back by stock transformers in a fresh process",
            Facts(facts),
            "What changed in config.json:",
            Code("\n".join(outcome.config_diff)),
        )
    page.section("Repeat it", Code(command))
    return page


def by_position_table(outcome: Outcome) -> Table:
    """Return a table of perplexity in each bucket of positions, with 95 % intervals."""
    edges = next(iter(outcome.evaluations().values())).edges
    trained = outcome.checkpoint.trained_length
    buckets = (
        Heading(f"{a:,}–{b:,}", "tokens" if b <= trained else "tokens, beyond training")
        for a, b in itertools.pairwise(edges)
    )
    header = ["method", *buckets, Heading("stock tools", "load it as it is")]
    rows = []
    for name, evaluation in outcome.evaluations().items():
        cells = [_with_interval(e) for e in evaluation.by_position]
        variant = outcome.measured[name][0] if name in outcome.measured else None
        rows.append([name, *cells, loads(variant)])
    return Table(header, rows, "Perplexity per token; in brackets a 95 % interval over documents")


def _with_interval(e: Estimate) -> Cell | str:
    if not e.tokens:
        return Cell("cannot", note="Its table of positions has no rows there.")
    if math.isnan(e.low):
        return Cell(f"{e.perplexity:.2f}", note="Too few documents for an interval.")
    return f"{e.perplexity:.2f} ({math.exp(min(e.low, 50)):.2f}–{math.exp(min(e.high, 50)):.2f})"


def loads(variant: Variant | None) -> str:
    """Return, in words, whether stock tools load a variant."""
    if variant is not None and variant.window is not None:
        return NO_EXTENSION
    if variant is None or (variant.cache_safe and not variant.needs_runtime):
        return "yes"
    return OUR_RUNTIME if variant.needs_runtime else INEXACT
