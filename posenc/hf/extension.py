"""Extend a checkpoint's context: try the ways, measure them alike, recommend, tune, export,
prove."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.checkpoints import rope_config, tables
from posenc.checkpoints.loading import Checkpoint, load, read_config
from posenc.checkpoints.text import Windows, encode_until, encoder, mask_token, pack
from posenc.hf import export
from posenc.hf.measure import Evaluation, PasskeyGrid, Reader
from posenc.hf.measure import evaluate as measure
from posenc.hf.methods import METHODS
from posenc.hf.search import Search, apply_genome
from posenc.hf.tune import TuneConfig, tune
from posenc.hf.variants import (
    Variant,
    position_maps,
    rope_variant,
    searched,
    table_variant,
)

Progress = Callable[[str, float], None]

NO_EXTENSION = {
    "t5": "T5's bias saturates at a distance, so that any length has a bias; it needs no extension",
    "umt5": "T5's bias saturates, so that any length has a bias; it needs no extension",
    "bloom": "ALiBi's bias is defined at any distance; BLOOM needs no extension",
    "mpt": "ALiBi's bias is defined at any distance; raise max_seq_len in the config",
    "gptj": "GPT-J computes its angles from a fixed base and reads no rotary settings from its "
    "config, so that nothing written there could extend it",
}


@dataclass(frozen=True)
class Options:
    """What to measure and how much of it.

    windows: windows of the target length to read. search_minutes: budget of the search, 0 for none.
    targets: tokens at the end of a window whose loss is read with growing context.
    """

    windows: int = 16
    search_minutes: float = 2.0
    targets: int = 64
    passkey_trials: int = 2
    allow_cache_unsafe: bool = False
    tune: TuneConfig | None = None
    state: Path | None = None
    """Where search and tuning keep what a restart needs; None: nowhere."""


@dataclass
class Outcome:
    """All variants measured, the recommendation, and what was exported."""

    checkpoint: Checkpoint
    target: int
    measured: dict[str, tuple[Variant, Evaluation]]
    recommended: str
    reason: str
    tuned: Evaluation | None = None
    tuning_losses: list[float] = field(default_factory=list)
    config_diff: list[str] = field(default_factory=list)
    proof: export.Proof | None = None


def extend(
    folder: str | Path,
    to: int,
    documents: Sequence[str],
    *,
    method: str | None = None,
    out: str | Path | None = None,
    options: Options = Options(),
    as_bytes: bool = False,
    as_ids: bool = False,
    progress: Progress = lambda what, share: None,
) -> Outcome:
    """Stretch the checkpoint in `folder` to `to` tokens and measure it before and after.

    Args:
        folder: a Hugging Face folder with safetensors.
        to: the new length in tokens, above the trained one.
        documents: texts to measure on; the first half serves search and tuning,
            the second the measurement.
        method: one of METHODS, "search" or None: try all and recommend.
        out: a new folder for the extended checkpoint; None writes nothing.
        as_bytes, as_ids: documents are bytes, or token ids in words, and no tokenizer is asked.

    Raises: ValueError for anything that cannot be extended, with the reason.
    """
    refuse_family(read_config(Path(folder)), folder)
    checkpoint = load(folder)
    _check_request(checkpoint, to, method, out, options)
    vocabulary = checkpoint.config.vocab_size
    encode = encoder(checkpoint.folder, vocabulary, as_bytes=as_bytes, as_ids=as_ids)
    half = len(documents) // 2
    fitting = None
    if half and _needs_fitting(method, options):
        fitting = pack([encode(document) for document in documents[:half]], to)
    tokens = encode_until(encode, documents[half:], to * options.windows)
    windows = pack(tokens, to, options.windows)
    variants = _variants(checkpoint, to, method, fitting, options, progress)
    trained = checkpoint.trained_length
    measured = {}
    for i, variant in enumerate(variants):

        def report(what: str, share: float, done: int = i, name: str = variant.name) -> None:
            progress(f"{name}: {what}", (done + share) / len(variants))

        measured[variant.name] = (
            variant,
            _measure(checkpoint, variant, windows, trained, options, report),
        )
    recommended, reason = recommend(measured, trained, options)
    outcome = Outcome(checkpoint, to, measured, recommended, reason)
    if out is not None:
        chosen = measured[method or recommended][0]
        _export(outcome, chosen, Path(out), fitting, windows, options, progress)
    return outcome


def evaluate(
    folder: str | Path,
    documents: Sequence[str],
    length: int,
    *,
    options: Options = Options(),
    as_bytes: bool = False,
    as_ids: bool = False,
    progress: Progress = lambda what, share: None,
) -> Evaluation:
    """Measure a checkpoint as it is on windows of `length` tokens: loss by position and by context,
    passkeys, entropy of attention.

    Raises: ValueError for a folder that cannot be loaded, or too little text.
    """
    checkpoint = load(folder)
    vocabulary = checkpoint.config.vocab_size
    encode = encoder(checkpoint.folder, vocabulary, as_bytes=as_bytes, as_ids=as_ids)
    windows = pack(encode_until(encode, documents, length * options.windows), length)
    trained = checkpoint.trained_length
    return _measure(checkpoint, _as_is(checkpoint), windows, trained, options, progress)


def refuse_family(raw: dict[str, Any], folder: str | Path) -> None:
    """Refuse what needs no extension or can have none. Raises: ValueError with the reason."""
    reason = NO_EXTENSION.get(str(raw.get("model_type")))
    if reason:
        raise ValueError(f"{folder}: {reason}.")


def _check_request(
    checkpoint: Checkpoint, to: int, method: str | None, out: str | Path | None, options: Options
) -> None:
    rope_config.check(checkpoint.raw_config)
    rotary, table = rope_config.read(checkpoint.config), tables.find(checkpoint.model)
    if not rotary and table is None:
        raise ValueError(
            f"{checkpoint.folder}: a {checkpoint.config.model_type} model has neither rotary "
            "settings in its config nor a table of positions that posenc knows."
        )
    if to <= checkpoint.trained_length:
        raise ValueError(
            f"--to {to} is not beyond the trained length of {checkpoint.trained_length} tokens."
        )
    known = (*METHODS, "search") if rotary else ("none", *tables.METHODS)
    if method is not None and method not in known:
        raise ValueError(f"Unknown method {method!r}; known: {', '.join(known)}.")
    if out is not None and Path(out).exists():
        raise ValueError(f"{out} exists already; give a new folder.")
    if options.tune is not None and out is None:
        raise ValueError("Tuning changes the weights: say with --out where to write them.")
    if (
        out is not None
        and method in METHODS
        and not METHODS[method].cache_safe
        and not options.allow_cache_unsafe
    ):
        raise ValueError(
            f"{method} changes its frequencies with the length: keys in the cache keep the old "
            "rotation, and "
            "step-by-step decoding differs from a full pass. Give --allow-cache-unsafe to write "
            "it all the same."
        )


def _needs_fitting(method: str | None, options: Options) -> bool:
    return (
        options.tune is not None
        or method == "search"
        or (method is None and options.search_minutes > 0)
    )


def _variants(
    checkpoint: Checkpoint,
    to: int,
    method: str | None,
    fitting: Windows | None,
    options: Options,
    progress: Progress,
) -> list[Variant]:
    if not rope_config.read(checkpoint.config):
        chosen = tables.METHODS if method is None else [method]
        names = ["none", *(name for name in chosen if name != "none")]
        return [table_variant(checkpoint, name, to) for name in names]
    names = ["none", method] if method in METHODS and method != "none" else ["none"]
    if method is None:
        names = list(METHODS)
    variants = [rope_variant(checkpoint, name, to) for name in names]
    if method in (None, "search") and options.search_minutes > 0:
        if fitting is None:
            raise ValueError(
                "The search needs more than one document: it must not fit the text it is "
                "measured on."
            )
        settings = rope_config.read(checkpoint.config)
        state = None if options.state is None else options.state / "search.json"
        search = Search(
            Reader(checkpoint.model), settings, fitting.take(16), checkpoint.trained_length, state
        )
        found = search.run(60 * options.search_minutes, progress)
        variants.append(
            searched(checkpoint, apply_genome(settings, found.genome, to), to, found.tried)
        )
    if method is None:
        variants += position_maps(checkpoint, to)
    return variants


def _measure(
    checkpoint: Checkpoint,
    variant: Variant,
    windows: Windows,
    trained: int,
    options: Options,
    progress: Progress,
) -> Evaluation:
    length = windows.tokens.shape[1]
    contexts = tuple(sorted({c for c in _doublings(trained // 4, length) if c > options.targets}))
    grid = PasskeyGrid(tuple(_doublings(trained, length)), trials=options.passkey_trials)
    masked = mask_token(checkpoint.folder) if checkpoint.masked else None
    if variant.limit is not None:
        contexts = tuple(c for c in contexts if c <= variant.limit)
        grid = replace(grid, lengths=tuple(n for n in grid.lengths if n <= variant.limit))
    with variant.active() as model:
        reader = Reader(model, masked, whole=not variant.cache_safe, limit=variant.limit)
        return measure(
            reader, windows, trained, contexts=contexts if masked is None else (),
            targets=options.targets, passkey=grid if masked is None else None,
            entropy=not variant.needs_runtime, progress=progress,
        )  # fmt: skip


def _doublings(start: int, stop: int) -> list[int]:
    lengths = []
    while start < stop:
        lengths.append(start)
        start *= 2
    return [*lengths, stop]


def recommend(
    measured: dict[str, tuple[Variant, Evaluation]], trained: int, options: Options
) -> tuple[str, str]:
    """The variant with the lowest mean loss over all buckets that stock tools can load, and why.

    Every bucket counts the same, so that neither the short range nor the long one is sacrificed.
    """

    allowed = {
        name: evaluation
        for name, (variant, evaluation) in measured.items()
        if not variant.needs_runtime and (variant.cache_safe or options.allow_cache_unsafe)
    }
    best = min(allowed, key=lambda name: allowed[name].average())
    base, chosen = measured["none"][1], allowed[best]
    if best == "none":
        return (
            best,
            "No method tried lowers the mean loss over all positions: leave the checkpoint as it "
            "is, or tune.",
        )
    lost = chosen.short(trained) - base.short(trained)
    gained = base.long(trained) - chosen.long(trained)
    if math.isnan(gained):
        return best, (
            f"{best} has the lowest mean loss over all position buckets, "
            f"{chosen.long(trained):.2f} nats per token beyond {trained} tokens, where the model "
            f"could not read before; within them it costs {lost:.2f}."
        )
    return best, (
        f"{best} has the lowest mean loss over all position buckets: beyond {trained} tokens it "
        "saves "
        f"{gained:.2f} nats per token, within them it costs {lost:.2f}. "
        "This says nothing about tasks that need a fact from far back; see the passkey grid for "
        "that."
    )


def _export(
    outcome: Outcome, chosen: Variant, out: Path, fitting: Windows | None, windows: Windows,
    options: Options,
    progress: Progress,
) -> None:  # fmt: skip
    checkpoint, trained = outcome.checkpoint, outcome.checkpoint.trained_length
    with chosen.active():
        if options.tune is not None:
            if fitting is None:
                raise ValueError(
                    "Tuning needs more than one document: it must not fit the text it is "
                    "measured on."
                )
            masked = mask_token(checkpoint.folder) if checkpoint.masked else None
            state = _state(options, out) / "tune"
            outcome.tuning_losses = tune(
                checkpoint.model, fitting, trained, options.tune, state, progress, masked
            )
            same = replace(chosen, active=lambda: nullcontext(checkpoint.model))
            outcome.tuned = _measure(checkpoint, same, windows, trained, options, progress)
        tokens = _proof_tokens(windows, trained)
        outcome.config_diff, outcome.proof = export.write(
            checkpoint, out, tokens, cache_safe=chosen.cache_safe
        )
    if options.state is None:
        shutil.rmtree(_state(options, out), ignore_errors=True)


def _state(options: Options, out: Path) -> Path:
    return options.state or out.parent / f".{out.name}.state"


def _as_is(checkpoint: Checkpoint) -> Variant:
    """The checkpoint unchanged; a table of positions ends what it can read."""
    if rope_config.read(checkpoint.config):
        return rope_variant(checkpoint, "none", checkpoint.trained_length)
    if tables.find(checkpoint.model) is not None:
        return table_variant(checkpoint, "none", checkpoint.trained_length)
    return Variant("none", "as trained", lambda: nullcontext(checkpoint.model))


def _proof_tokens(windows: Windows, trained: int) -> Tensor:
    """One window, a little beyond the trained length, so that the proof stays quick for large
    models."""
    length = min(windows.tokens.shape[1], trained + 64)
    return windows.tokens[:1, :length].to(torch.int64).contiguous()
