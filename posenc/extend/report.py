"""The outcome of an extension as a report, and its numbers by the names that programs read."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from posenc.extend import figures
from posenc.extend.export.prover import Proof
from posenc.extend.export.serve_page import window_by_runtime
from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.measure.tasks import TaskScore
from posenc.extend.recommendation import Outcome
from posenc.extend.variants import WINDOW, WINDOW_IN_CONFIG, Variant
from posenc.extend.vectors.report import facts_of_vectors, vector_sections
from posenc.report.report import (
    Block,
    Cell,
    Code,
    Facts,
    Heading,
    Number,
    Report,
    Section,
    Table,
    Value,
)
from posenc.statistics.text_intervals import Estimate

OUT_OF_DOMAIN_CAUTION = (
    "Measured on the source of Python's standard library. This says little about models trained on "
    "other text: give --text with text like the model's own."
)


def report_of(outcome: Outcome, command: str, caution: str | None = None) -> Report:
    """Return the report of an extension. command: the line that repeats it. caution: a warning
    about the text on which it was measured."""
    checkpoint = outcome.checkpoint
    train_length = checkpoint.trained_length
    return Report(
        f"{checkpoint.folder.name}: {train_length:,} to {outcome.target:,} tokens",
        outcome.reason,
        facts_of(outcome),
        [*_sections(outcome, train_length), Section("Repeat it", [Code(command)], is_detail=True)],
        f"Methods of extending a model from {train_length:,} tokens to {outcome.target:,}, "
        "measured on the same text.",
        cautions=[caution] if caution else [],
    )


def _sections(outcome: Outcome, train_length: int) -> Iterator[Section]:
    """Yield the sections of the report, those that were not measured left out."""
    has_head = outcome.checkpoint.has_head
    if has_head:
        yield Section("Perplexity by position", _perplexity_section(outcome, train_length))
    else:
        yield from vector_sections(outcome.evaluations(), train_length)
    summaries = {name: variant.summary for name, (variant, _) in outcome.measured.items()}
    yield Section("What was tried", [Facts({k: v for k, v in summaries.items() if v})])
    if outcome.not_measured:
        not_measured = {name: f"not measured: {why}" for name, why in outcome.not_measured.items()}
        yield Section("What could not be measured on this model", [Facts(not_measured)])
    if has_head:
        yield from _loss_sections(outcome, train_length)
    if outcome.measured["none"][0].settings:
        yield Section("Frequencies", [*figures.wavelength_plots(outcome)], is_detail=True)
    if outcome.proof is not None:
        yield Section(
            "Export, read back by stock transformers in a fresh process",
            [
                Facts(_proof_facts(outcome.proof, has_head=has_head)),
                "What changed in config.json:",
                Code("\n".join(outcome.config_diff)),
            ],
        )


def _loss_sections(outcome: Outcome, train_length: int) -> Iterator[Section]:
    """Yield the sections on what is measured besides perplexity of a model that predicts tokens."""
    note_on_nats = "The loss is in nats: one nat less divides the perplexity by 2.7."
    yield Section("Curves", [note_on_nats, *figures.curve_plots(outcome)], is_detail=True)
    windows_only = {"none", WINDOW, WINDOW_IN_CONFIG}
    if outcome.recommended == WINDOW or outcome.measured.keys() <= windows_only:
        yield Section("Serve the last tokens only", _window_section(outcome, train_length))
    yield Section("Passkeys", _passkey_section(outcome), is_detail=True)
    if (table := task_table(outcome)) is not None:
        yield Section("Tasks and short texts", [table])


def _window_section(outcome: Outcome, train_length: int) -> list[Block]:
    """Return how each runtime reads only the last tokens of a text, with the unchanged model."""
    by_runtime = window_by_runtime(str(outcome.checkpoint.folder), train_length)
    blocks: list[Block] = [
        f"The row {WINDOW} is the unchanged model that reads the last {train_length:,} tokens. The "
        "lines are from the documents and the code of each runtime; none was run."
    ]
    for name, window in by_runtime.items():
        blocks.append(Facts({name: window.effect}))
        blocks.append(Code("\n".join(window.lines)))
    return blocks


def _perplexity_section(outcome: Outcome, train_length: int) -> list[Block]:
    """Return an explanation and the table of perplexity by method and bucket of positions."""
    explanation = (
        "Perplexity is the exponential of the loss: 1 is certain, lower is better. Up to "
        f"{train_length:,} tokens it shows what a method costs within the training length, beyond "
        "them what it gains."
    )
    edges = next(iter(outcome.evaluations().values())).edges
    bucket_headings = (
        Heading(f"{a:,}–{b:,}", "tokens" if b <= train_length else "tokens, beyond training")
        for a, b in itertools.pairwise(edges)
    )
    header = ["method", *bucket_headings, Heading("stock tools", "load it as it is")]
    rows = []
    for name, evaluation in outcome.evaluations().items():
        variant = outcome.measured[name][0] if name in outcome.measured else None
        rows.append(
            [
                name,
                *map(_perplexity_cell, evaluation.loss_by_position),
                _stock_tools_verdict(variant),
            ]
        )
    caption = "Perplexity by position, tokens; in brackets a 95 % interval over documents"
    return [explanation, Table(header, rows, caption, name="perplexity-by-position")]


def _perplexity_cell(loss: Estimate) -> Value:
    """Return the cell of a loss as perplexity with its interval, or a note on what is missing."""
    if not loss.tokens:
        return Cell("cannot", note="Its table of positions has no rows there.")
    if math.isnan(loss.low):
        return Cell(
            Number(loss.perplexity, format_spec=".2f"), note="Too few documents for an interval."
        )
    low, high = (math.exp(min(end, 50.0)) for end in (loss.low, loss.high))
    return Number(loss.perplexity, low, high, ".2f")


def _stock_tools_verdict(variant: Variant | None) -> str:
    """Return the cell that says whether stock tools load a variant; None is the tuned
    checkpoint."""
    if variant is None:
        return "yes"
    if variant.window_length is not None:
        return "no extension"
    if variant.needs_special_runtime:
        return "needs our runtime"
    return "yes" if variant.cache_safe else "yes, but its cache is inexact"


def task_table(outcome: Outcome) -> Table | None:
    """Return the table of tasks and of short texts, with a row for each method; None if neither was
    measured.

    For each task and length it has the fraction of prompts answered exactly and the loss of the
    answer, in nats; for short texts the change of perplexity, in percent.
    """
    rises = outcome.short_text_rises()
    tasks_and_lengths: list[tuple[str, int]] = []
    for evaluation in outcome.evaluations().values():
        tasks_and_lengths += [key for key in evaluation.task_scores if key not in tasks_and_lengths]
    if not tasks_and_lengths and not rises:
        return None
    header = _task_header(tasks_and_lengths, bool(rises))
    rows = []
    for name, evaluation in outcome.evaluations().items():
        row: list[Value] = [name]
        for task, length in tasks_and_lengths:
            score = evaluation.task_scores.get((task, length))
            row += _task_cells(score, is_learned=outcome.score_is_meaningful(task, length))
        if rises:
            row.append(_perplexity_rise(rises[name]) if name in rises else None)
        rows.append(row)
    return Table(header, rows, _task_caption(bool(tasks_and_lengths), bool(rises)), name="tasks")


def _task_header(
    tasks_and_lengths: Iterable[tuple[str, int]], has_short_texts: bool
) -> list[str | Heading]:
    """Return the headings: two columns for each task and length that were asked for."""
    header: list[str | Heading] = ["method"]
    for task, length in tasks_and_lengths:
        header.append(Heading(f"{task}, {length:,}", "answered exactly"))
        header.append(Heading(f"{task}, {length:,}: loss", "of the answer, nats"))
    if has_short_texts:
        header.append(Heading("short texts", "change of perplexity"))
    return header


def _task_cells(score: TaskScore | None, *, is_learned: bool) -> list[Value]:
    """Return a method's fraction of exact answers to a task of one length, and its loss."""
    if score is None:
        return [None, None]
    exact_share_cell = Number(
        score.exact_share.mean, score.exact_share.low, score.exact_share.high, ".0%"
    )
    loss_cell = Number(score.loss.mean, format_spec=".2f")
    return [exact_share_cell if is_learned else "not learned", loss_cell]


def _task_caption(has_tasks: bool, has_short_texts: bool) -> str:
    """Return the caption of the table of tasks, whose columns are the tasks, the short texts, or
    both."""
    tasks_in_words = (
        "Fraction of prompts answered exactly, with a 95 % Wilson interval over all depths, and "
        "the loss of the answer"
    )
    short_texts_in_words = (
        "the change of perplexity on short texts, read by themselves, with a 95 % interval over "
        "documents"
    )
    if not has_short_texts:
        return tasks_in_words
    if not has_tasks:
        return short_texts_in_words[0].upper() + short_texts_in_words[1:]
    return f"{tasks_in_words}. Last: {short_texts_in_words}"


def _perplexity_rise(loss: Estimate) -> Number:
    """Return a rise of the loss, in nats, and its interval as a rise of perplexity in percent. A
    NaN interval is left out."""
    mean, low, high = (
        100 * math.expm1(min(nats, 50.0)) for nats in (loss.mean, loss.low, loss.high)
    )
    has_interval = not math.isnan(low)
    return Number(
        mean, low if has_interval else None, high if has_interval else None, "+z.1f", " %"
    )


def _passkey_section(outcome: Outcome) -> list[Block]:
    """Return the blocks on passkeys: a warning if there is one, see `passkeys_not_found_warning`,
    and the grid of each method; "Not measured." if there is none."""
    plots = [*figures.passkey_plots(outcome)]
    if not plots:
        return ["Not measured."]
    grids = [e.passkey_shares for e in outcome.evaluations().values() if e.passkey_shares]
    warning = passkeys_not_found_warning(grids)
    return [*([warning] if warning else []), *plots]


def passkeys_not_found_warning(grids: Sequence[Mapping[tuple[int, float], float]]) -> str:
    """Return a warning if no method finds half of the keys' tokens in the shortest texts, on
    average over their depths; else "".

    grids: for each method that was tested, the fraction of a key's tokens that are right, by
    (length, depth). At least one.
    """
    shortest_length = min(length for grid in grids for length, _ in grid)
    for grid in grids:
        shares = [share for (length, _), share in grid.items() if length == shortest_length]
        if shares and fmean(shares) >= 0.5:
            return ""
    return (
        f"Read nothing into this: not even at {shortest_length:,} tokens does the model find half "
        "of the keys' tokens."
    )


def _proof_facts(proof: Proof, *, has_head: bool) -> dict[str, object]:
    """Return the findings of the fresh process as texts, by the quantity that it compared."""
    padding_error = proof.padding_error
    return {
        "largest relative error of a frequency": f"{proof.inv_freq_error:.1e}",
        f"largest difference of a {'logit' if has_head else 'state'}": f"{proof.logits_error:.1e}",
        "step-by-step decoding against one pass": f"{proof.decode_error:.1e}",
        "rows of a padded batch against each by itself": (
            "not compared" if padding_error is None else f"{padding_error:.1e}"
        ),
        "tokens generated past the old length": proof.num_generated,
    }


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """Return all that was measured, recommended and written, by the keys of --json. Losses are in
    nats per token. A number that could not be measured is NaN, as for a learned table all positions
    beyond its last row."""
    rises = outcome.short_text_rises()
    facts_by_method = {}
    for name, evaluation in outcome.evaluations().items():
        variant = outcome.measured[name][0] if name in outcome.measured else None
        facts_by_method[name] = {
            "summary": variant.summary if variant else "",
            "stock_tools_load_it": variant is None or not variant.needs_special_runtime,
            "cache_is_exact": variant is None or variant.cache_safe,
            **_facts_of_evaluation(evaluation, outcome),
            "short_text_rise": rises.get(name),
        }
    return {
        "folder": str(outcome.checkpoint.folder),
        "trained_length": outcome.checkpoint.trained_length,
        "target_length": outcome.target,
        "measured": facts_by_method,
        "not_measured": outcome.not_measured,
        "recommended": outcome.recommended or None,
        "reason": outcome.reason,
        "tuning_losses": outcome.tuning_losses,
        "config_changes": outcome.config_diff,
        "left_behind": outcome.files_not_copied,
        "proof": outcome.proof,
    }


def _facts_of_evaluation(evaluation: Evaluation, outcome: Outcome) -> dict[str, Any]:
    """Return the measurements of one method as plain lists and dicts."""
    buckets = itertools.pairwise(evaluation.edges)
    if evaluation.vectors is not None:
        return facts_of_vectors(evaluation, outcome.measured["none"][1])
    return {
        "by_position": [
            {"from": low, "to": high, **vars(estimate)}
            for (low, high), estimate in zip(buckets, evaluation.loss_by_position, strict=True)
        ],
        "by_context": [
            {"context": context_length, **vars(estimate)}
            for context_length, estimate in evaluation.loss_by_context.items()
        ],
        "passkey": [
            {"length": length, "depth": depth, "right": share}
            for (length, depth), share in evaluation.passkey_shares.items()
        ],
        "tasks": [
            {
                "task": task,
                "length": length,
                "counts": outcome.score_is_meaningful(task, length),
                "exact": score.exact_share,
                "loss": score.loss,
                "by_depth": [
                    {"depth": depth, **depth_score._asdict()}
                    for depth, depth_score in score.by_depth.items()
                ],
            }
            for (task, length), score in evaluation.task_scores.items()
        ],
        "tasks_left_out": [
            {"task": task, "length": length, "why": why}
            for (task, length), why in evaluation.tasks_left_out.items()
        ],
        "attention_entropy": list(evaluation.entropy_by_bucket),
        "seconds": evaluation.seconds,
    }
