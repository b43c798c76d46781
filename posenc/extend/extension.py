"""Extend a checkpoint's context: try the ways, measure them alike, recommend, tune, export,
prove."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from posenc.extend.candidates import SEARCH_WINDOWS, candidates, measure_variant, needs_search
from posenc.extend.export import folder as export
from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.measure.samples import halves, sample
from posenc.extend.options import DEFAULTS, Options, Progress
from posenc.extend.recommendation import recommend
from posenc.extend.refusals import check_folders, check_request
from posenc.extend.tune.tuning import tune
from posenc.extend.variants import Variant, rope_variant, table_variant
from posenc.hf import rope_config, tables
from posenc.hf.loading import Checkpoint, load
from posenc.hf.text import Windows, encoder, mask_token


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

    def evaluations(self) -> dict[str, Evaluation]:
        """All that was measured, by name, the tuned checkpoint last."""
        found = {name: evaluation for name, (_, evaluation) in self.measured.items()}
        return found if self.tuned is None else {**found, "tuned": self.tuned}


def extend(
    folder: str | Path,
    to: int,
    documents: Sequence[str],
    *,
    method: str | None = None,
    out: str | Path | None = None,
    options: Options = DEFAULTS,
    as_bytes: bool = False,
    as_ids: bool = False,
    progress: Progress = lambda what, share: None,
) -> Outcome:
    """Stretch the checkpoint in `folder` to `to` tokens and measure it before and after.

    Args:
        folder: a Hugging Face folder with safetensors.
        to: the new length in tokens, above the trained one.
        documents: texts to measure on; the first half serves search and tuning,
            the second the measurement. A few long ones are cut.
        method: one of METHODS, "search" or None: try all and recommend.
        out: a new folder for the extended checkpoint; None writes nothing.
        as_bytes, as_ids: documents are bytes, or token ids in words, and no tokenizer is asked.

    Raises: ValueError for anything that cannot be extended, with the reason.
    """
    out = None if out is None else Path(out)
    check_folders(Path(folder), out, options)
    checkpoint = load(folder)
    trained = checkpoint.trained_length
    check_request(checkpoint, to, method, writes=out is not None, options=options)
    vocabulary = checkpoint.config.vocab_size
    encode = encoder(checkpoint.folder, vocabulary, as_bytes=as_bytes, as_ids=as_ids)
    to_fit, to_measure = halves(documents, to)
    windows = sample(encode, to_measure, to, options.windows)
    fitting = None
    if needs_search(method, options) or options.tune is not None:
        read = options.tune.steps * options.tune.batch if options.tune else 0
        fitting = sample(encode, to_fit, to, max(SEARCH_WINDOWS, read))
    if options.state is None and out is not None:
        options = replace(options, state=_own_state(out))
    with export.Prover() as prover:
        if out is not None and options.tune is None:
            prover.start()  # its imports run beside the measurement; tuning would keep it waiting
        variants = candidates(checkpoint, to, method, fitting, options, progress)
        measured = {}
        for i, variant in enumerate(variants):

            def report(what: str, share: float, done: int = i, name: str = variant.name) -> None:
                progress(f"{name}: {what}", (done + share) / len(variants))

            evaluation = measure_variant(checkpoint, variant, windows, trained, options, report)
            measured[variant.name] = (variant, evaluation)
        recommended, reason = recommend(measured, trained, options)
        outcome = Outcome(checkpoint, to, measured, recommended, reason)
        if out is not None:
            chosen = measured[method or recommended][0]
            _export(outcome, chosen, trained, out, prover, fitting, windows, options, progress)
            shutil.rmtree(_own_state(out), ignore_errors=True)
    return outcome


def evaluate(
    folder: str | Path,
    documents: Sequence[str],
    length: int,
    *,
    options: Options = DEFAULTS,
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
    windows = sample(encode, documents, length, options.windows)
    trained = checkpoint.trained_length
    return measure_variant(checkpoint, _as_is(checkpoint), windows, trained, options, progress)


def _export(
    outcome: Outcome, chosen: Variant, trained: int, out: Path, prover: export.Prover,
    fitting: Windows | None, windows: Windows, options: Options, progress: Progress,
) -> None:  # fmt: skip
    checkpoint = outcome.checkpoint
    teacher = None
    if options.tune is not None and options.tune.distill and not checkpoint.masked:
        teacher = copy.deepcopy(checkpoint.model)  # before it is stretched
    with chosen.active():
        if options.tune is not None:
            assert fitting is not None
            assert options.state is not None
            masked = mask_token(checkpoint.folder) if checkpoint.masked else None
            outcome.tuning_losses = tune(
                checkpoint.model, fitting, trained, options.tune, options.state / "tune", progress,
                masked, teacher,
            )  # fmt: skip
            same = replace(chosen, active=lambda: nullcontext(checkpoint.model))
            outcome.tuned = measure_variant(checkpoint, same, windows, trained, options, progress)
        tokens = _proof_tokens(windows, trained)
        outcome.config_diff, outcome.proof = export.write(
            checkpoint, out, prover, tokens, cache_safe=chosen.cache_safe
        )


def _own_state(out: Path) -> Path:
    """Where a restart of a command without --state finds what is done; gone after the export."""
    return out.parent / f".{out.name}.state"


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
