"""The page of an extension: what each method does to every position, before and after."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from posenc.checkpoints.rope_config import RopeSetting
from posenc.drawing import figure, legend_above, length_axis, line_styles
from posenc.hf.extension import Outcome
from posenc.hf.measure import Estimate, Evaluation
from posenc.report import Caution, Cell, Code, Facts, Headline, Page, Plot, Table


def write_page(outcome: Outcome, path: Path, command: str, caution: str | None) -> None:
    """Write extend.html. `caution` says what the reader must know about the text that was
    measured."""
    checkpoint = outcome.checkpoint
    page = Page(
        f"{checkpoint.folder.name}: {checkpoint.trained_length} to {outcome.target} tokens",
        "Position methods measured on the same text",
    )
    page.section("", Headline(outcome.reason), *([Caution(caution)] if caution else []))
    page.section("Perplexity by position", by_position_table(outcome))
    page.section("Curves", *_curves(outcome))
    if outcome.measured["none"][0].settings:
        page.section("Frequencies", *_frequencies(outcome))
    page.section("Passkeys", *_passkeys(outcome))
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


def evaluations(outcome: Outcome) -> dict[str, Evaluation]:
    """All that was measured, by name, the tuned checkpoint last."""
    found = {name: evaluation for name, (_, evaluation) in outcome.measured.items()}
    if outcome.tuned is not None:
        found["tuned"] = outcome.tuned
    return found


def by_position_table(outcome: Outcome) -> Table:
    """Perplexity in each bucket of positions, with its 95 % interval."""
    edges = next(iter(evaluations(outcome).values())).edges
    header = [
        "method",
        *(f"{a}–{b}" for a, b in itertools.pairwise(edges)),
        "loads in stock tools",
    ]
    rows = []
    for name, evaluation in evaluations(outcome).items():
        cells = [_with_interval(e) for e in evaluation.by_position]
        variant = outcome.measured[name][0] if name in outcome.measured else None
        rows.append([name, *cells, _loads(variant)])
    return Table(header, rows, "Perplexity per token; in brackets a 95 % interval over documents")


def _with_interval(e: Estimate) -> Cell | str:
    if not e.tokens:
        return Cell("cannot", note="Its table of positions has no rows there.")
    return f"{e.perplexity:.2f} ({math.exp(min(e.low, 50)):.2f}–{math.exp(min(e.high, 50)):.2f})"


def _loads(variant) -> str:
    if variant is None or (variant.cache_safe and not variant.needs_runtime):
        return "yes"
    return "needs our runtime" if variant.needs_runtime else "yes, but its cache is inexact"


def _curves(outcome: Outcome) -> Iterator[Plot]:
    named = evaluations(outcome)
    styles = line_styles(list(named))
    trained = outcome.checkpoint.trained_length
    edges = next(iter(named.values())).edges
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    with figure("position in the window, tokens", "loss, nats per token") as (drawn, axes):
        for name, evaluation in named.items():
            axes.plot(
                middles,
                [e.mean for e in evaluation.by_position],
                label=name,
                **styles[name].points(),
            )
        length_axis(axes, edges[1:], trained)
    legend_above(drawn)
    yield Plot(drawn, "Loss by position, mean of each bucket.", _words(named, edges))
    with_context = {name: e for name, e in named.items() if e.by_context}
    if with_context:
        lengths = sorted({n for e in with_context.values() for n in e.by_context})
        with figure("context, tokens", "loss of the same last tokens, nats") as (drawn, axes):
            for name, evaluation in with_context.items():
                axes.plot(
                    list(evaluation.by_context),
                    [e.mean for e in evaluation.by_context.values()],
                    label=name,
                    **styles[name].points(),
                )
            length_axis(axes, lengths, trained)
        legend_above(drawn)
        yield Plot(
            drawn,
            "Loss of the same target tokens as their context grows; it falls where it is used.",
            "One line per method over context length.",
        )  # fmt: skip
    shown = {name: e.entropy for name, e in named.items() if e.entropy}
    if shown:
        with figure("position in the window, tokens", "entropy of attention, nats") as (
            drawn,
            axes,
        ):
            for name, entropy in shown.items():
                axes.plot(middles, entropy, label=name, **styles[name].points())
            length_axis(axes, edges[1:], trained)
        legend_above(drawn)
        yield Plot(
            drawn, "Mean entropy of attention over layers and heads: how widely a token looks.",
            "One line per method over position.",
        )  # fmt: skip


def _words(named: dict[str, Evaluation], edges: tuple[int, ...]) -> str:
    return "; ".join(
        f"{name}: {e.by_position[0].mean:.2f} at the start, {e.by_position[-1].mean:.2f} up to "
        f"{edges[-1]}"
        for name, e in named.items()
    )


def _frequencies(outcome: Outcome) -> Iterator[Plot]:
    for setting in outcome.measured["none"][0].settings:
        yield Plot(
            wavelengths(outcome, setting),
            "Wavelength of each pair of channels. A pair above the dotted line never finishes a "
            "turn within the "
            "trained length, so that the model has not seen all of its angles.",
            f"{unfinished(setting)} of {setting.rotary_dim // 2} pairs never finish a turn in "
            f"{setting.original_length} tokens.",
        )


def unfinished(setting: RopeSetting) -> int:
    """Pairs that never finish a turn within the trained length."""
    return sum(
        float(f) * setting.original_length < 2 * math.pi for f in setting.frequencies().inv_freq
    )


def wavelengths(outcome: Outcome, base: RopeSetting) -> Figure:
    """Wavelength by pair for every method with frequencies of its own."""
    shown = {
        name: next(s for s in variant.settings if s.layer_type == base.layer_type)
        for name, (variant, _) in outcome.measured.items()
        if variant.settings and not variant.needs_runtime
    }
    styles = line_styles(list(outcome.measured))
    with figure("pair of channels, fastest first", "wavelength, tokens") as (drawn, axes):
        for name, setting in shown.items():
            inv_freq = np.array([float(f) for f in setting.frequencies(outcome.target).inv_freq])
            turning = inv_freq > 0
            pairs = np.arange(len(inv_freq))
            axes.plot(
                pairs[turning], 2 * np.pi / inv_freq[turning], label=name, **styles[name].points()
            )
        axes.set_yscale("log")
        axes.axhline(base.original_length, color="gray", linestyle=":", linewidth=1)
    legend_above(drawn)
    return drawn


def _passkeys(outcome: Outcome) -> Iterator[str | Table]:
    named = {name: e for name, e in evaluations(outcome).items() if e.passkey}
    if not named:
        yield "Not measured."
        return
    lengths = sorted({length for e in named.values() for length, _ in e.passkey})
    rows = []
    for name, evaluation in named.items():
        depths = sorted({depth for _, depth in evaluation.passkey})
        for depth in depths:
            found = [evaluation.passkey.get((n, depth)) for n in lengths]
            shares = [None if share is None else f"{100 * share:.0f} %" for share in found]
            rows.append([f"{name}, {100 * depth:.0f} % deep", *shares])
    yield (
        "Share of the tokens of a random key repeated right, by where the key stood and how long "
        "the text was."
    )
    yield Table(["method and depth", *(f"{n:,} tokens" for n in lengths)], rows)
