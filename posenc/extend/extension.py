"""Extend a checkpoint's context: measure all methods alike, recommend, tune, export, prove."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from posenc.extend.export.folder import ADAPTER, Plan, export_checkpoint
from posenc.extend.export.prover import Proof, Prover
from posenc.extend.measure.evaluation import Evaluation, regression, short_pieces
from posenc.extend.measure.intervals import Estimate
from posenc.extend.measure.losses import NotFinite
from posenc.extend.measure.samples import halves, sample_windows
from posenc.extend.measure.tasks import Encode
from posenc.extend.options import DEFAULTS, Options, Progress
from posenc.extend.recommendation import best_method, recommend
from posenc.extend.refusals import check_folders, check_request
from posenc.extend.restart import locked, own_state
from posenc.extend.tune.lora import save_adapter
from posenc.extend.tune.tuning import tune
from posenc.extend.variants.candidates import (
    SEARCH_WINDOWS,
    Builders,
    candidates,
    measure_variant,
    needs_search,
)
from posenc.extend.variants.variant import DROPE, Variant, as_is
from posenc.hf.checkpoint.loading import Checkpoint, load_checkpoint
from posenc.hf.checkpoint.text import Windows, mask_token, text_encoder
from posenc.hf.rope.apply import applied
from posenc.report.files.opened import remove_folder
from posenc.report.page.failure import RunFailed, one_line
from posenc.tasks.scoring import LEARNED


@dataclass
class Outcome:
    """All variants measured, the recommendation, and what was exported.

    recommended: a method, "none" to leave the model as it is, "" without a recommendation. failed:
    by name, why a variant could not be measured on this checkpoint. short_documents: the document
    of every token of the short texts.
    """

    checkpoint: Checkpoint
    target: int
    measured: dict[str, tuple[Variant, Evaluation]]
    recommended: str
    reason: str
    failed: dict[str, str] = field(default_factory=dict)
    short_documents: np.ndarray | None = None
    tuned: Evaluation | None = None
    tuning_losses: list[float] = field(default_factory=list)
    config_diff: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    proof: Proof | None = None

    def short_text(self) -> dict[str, Estimate]:
        """Return the extra loss on short texts, read by themselves, in nats per token by name."""
        before = self.measured["none"][1].short_text
        if before is None or self.short_documents is None:
            return {}
        return {
            name: regression(before, each.short_text, self.short_documents)
            for name, each in self.evaluations().items()
            if each.short_text is not None and name != "none"
        }

    def counts(self, task: str, length: int) -> bool:
        """Return True unless no method answers the task at the shortest length: fractions of right
        answers in longer texts then say nothing."""
        asked = [each.tasks for each in self.evaluations().values()]
        shortest = min(at for tasks in asked for name, at in tasks if name == task)
        scores = [tasks[task, shortest] for tasks in asked if (task, shortest) in tasks]
        return length == shortest or any(score.exact.mean >= LEARNED for score in scores)

    def evaluations(self) -> dict[str, Evaluation]:
        """Return all evaluations by name, the tuned checkpoint last."""
        found = {name: evaluation for name, (_, evaluation) in self.measured.items()}
        return found if self.tuned is None else {**found, "tuned": self.tuned}


class NotExported(RunFailed):
    """The export failed. `outcome` has everything that was measured."""

    def __init__(self, reason: str, outcome: Outcome) -> None:
        super().__init__(reason)
        self.outcome = outcome


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
    foreign: bool = False,
    progress: Progress = lambda what, share: None,
) -> Outcome:
    """Stretch the checkpoint in `folder` to `to` tokens and measure it before and after.

    Args:
        folder: a Hugging Face folder with safetensors.
        to: the new length in tokens, above the training length.
        documents: texts to measure on. The first half is for search and tuning, the second for the
            measurement. A few long ones are cut.
        method: one of METHODS, "search" or None: try all and recommend.
        out: a new folder for the extended checkpoint. Nothing is written, and `proof` is None, if
            it is None or if the recommendation is to leave the model unchanged.
        as_bytes, as_ids: documents are bytes, or token ids in words; no tokenizer is used.
        foreign: the documents were not chosen for this model, which may not know such text.

    Raises: TypeError unless `to` is a whole number. ValueError, with the reason, for anything that
    cannot be extended. RunFailed if `method`
    cannot be measured on this checkpoint; NotExported if the export cannot be proved.
    """
    if type(to) is not int:
        raise TypeError(f"extend: to must be a whole number of tokens, got {to!r}.")
    out = None if out is None else Path(out)
    check_folders(Path(folder), out, method, options)
    checkpoint = _load(folder, options)
    check_request(checkpoint, to, method, writes=out is not None, options=options, words=not as_ids)
    vocabulary = checkpoint.config.vocab_size
    encode = text_encoder(checkpoint.folder, vocabulary, as_bytes=as_bytes, as_ids=as_ids)
    to_fit, to_measure = halves(documents, to)
    windows = sample_windows(encode, to_measure, to, options.windows)
    fitting, searches = None, bool(checkpoint.rotary) and needs_search(method, options)
    if searches or options.tune is not None:
        read = options.tune.steps * options.tune.batch if options.tune else 0
        fitting = sample_windows(encode, to_fit, to, max(SEARCH_WINDOWS, read))
    if options.state is None and out is not None:
        options = replace(options, state=own_state(out))
    with ExitStack() as held:
        if fitting is not None and options.state is not None:
            held.enter_context(locked(options.state))
        prover = held.enter_context(Prover())
        if out is not None and options.tune is None:
            prover.start()  # imports while variants are measured; during tuning it would only wait
        builders = candidates(checkpoint, to, method, fitting, options, progress)
        measured, failed = _measure_all(
            checkpoint, builders, method, windows, options, progress, None if as_ids else encode
        )
        given = (measured, checkpoint.trained_length, options, windows.documents.numpy())
        recommended, reason = recommend(*given, foreign=foreign)
        short = short_pieces(windows, checkpoint.trained_length).documents.numpy()
        outcome = Outcome(checkpoint, to, measured, recommended, reason, failed, short)
        # Tuning may make a method better than what is best before it.
        chosen = method or (best_method(measured, options) if options.tune else recommended)
        if out is not None and chosen not in (None, "", "none"):
            variant, words = measured[chosen][0], None if as_ids else encode
            try:
                export_variant(
                    outcome, variant, out, prover, fitting, windows, options, progress, words
                )
            except RunFailed as error:
                raise NotExported(str(error), outcome) from error
            finally:
                if outcome.tuned is not None:
                    tuned = (chosen, outcome.tuned)
                    outcome.recommended, outcome.reason = recommend(*given, tuned, foreign=foreign)
            remove_folder(own_state(out))
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
    """Measure an unchanged checkpoint on windows of `length` tokens: loss by position and by
    context, passkeys, entropy of attention.

    Raises: ValueError for a folder that cannot be loaded, or too little text.
    """
    checkpoint = _load(folder, options)
    vocabulary = checkpoint.config.vocab_size
    encode = text_encoder(checkpoint.folder, vocabulary, as_bytes=as_bytes, as_ids=as_ids)
    windows = sample_windows(encode, documents, length, options.windows)
    words = None if as_ids else encode
    return measure_variant(checkpoint, as_is(checkpoint), windows, options, progress, words)


def _load(folder: str | Path, options: Options) -> Checkpoint:
    dtype = options.precision
    if dtype == "auto" and options.tune is not None:
        dtype = "float32"  # steps of a small rate are lost where weights have eight bits
    checkpoint = load_checkpoint(folder, dtype=dtype, device=options.device)
    if checkpoint.masked:
        mask_token(checkpoint.folder)  # raises before anything is measured
    return checkpoint


def _measure_all(
    checkpoint: Checkpoint,
    builders: Builders,
    method: str | None,
    windows: Windows,
    options: Options,
    progress: Progress,
    encode: Encode | None,
) -> tuple[dict[str, tuple[Variant, Evaluation]], dict[str, str]]:
    """Measure every variant, and note why some could not be measured. A method that this model's
    code refuses must not cost hours of measuring."""
    measured, failed = {}, {}
    for done, (name, build) in enumerate(builders.items()):

        def report(what: str, share: float, done: int = done, name: str = name) -> None:
            progress(f"{name}: {what}", (done + share) / len(builders))

        try:
            variant = build()
            evaluation = measure_variant(checkpoint, variant, windows, options, report, encode)
        except Exception as error:  # a family's code may raise anything for what it does not expect
            is_own = isinstance(error, ValueError)
            reason = " ".join(str(error).split()) if is_own else one_line(error)
            if name == "none" and isinstance(error, NotFinite):
                raise ValueError(f"{checkpoint.folder}: as it is, {reason}.") from error
            if isinstance(error, OSError) and name == method:  # of the disk, not of the model
                raise
            if name in ("none", method):
                raise RunFailed(f"{name} cannot be measured on this model: {reason}") from error
            failed[name] = reason
        else:
            measured[name] = (variant, evaluation)
    return measured, failed


def export_variant(
    outcome: Outcome,
    chosen: Variant,
    out: Path,
    prover: Prover,
    fitting: Windows | None,
    windows: Windows,
    options: Options,
    progress: Progress = lambda what, share: None,
    encode: Encode | None = None,
) -> None:
    """Tune a measured variant if requested, write it and prove it; the results go into the
    outcome."""
    checkpoint, trained = outcome.checkpoint, outcome.checkpoint.trained_length
    teacher, state = None, options.state
    assert state is not None
    changed = options.tune is not None or not checkpoint.rotary
    if options.tune is not None and options.tune.distill and not checkpoint.masked:
        teacher = copy.deepcopy(checkpoint.model)  # before it is stretched
    # A map of positions is a server's: its config is written for the model as trained.
    stretched = applied(checkpoint.model, chosen.settings, outcome.target)
    with stretched if chosen.extra else chosen.active():
        if options.tune is not None:
            assert fitting is not None
            masked = mask_token(checkpoint.folder) if checkpoint.masked else None
            short = 1.0 if chosen.name == DROPE else options.tune.short_share
            recipe, model = replace(options.tune, short_share=short), checkpoint.model
            keep = partial(save_adapter, model, state / "tune" / ADAPTER, checkpoint.folder)
            outcome.tuning_losses = tune(
                model, fitting, trained, recipe, state / "tune", progress, masked, teacher, keep
            )
        if changed:
            for weight in checkpoint.model.parameters():  # what is measured is what is written
                weight.data = weight.data.to(getattr(torch, checkpoint.stored))
        if options.tune is not None:
            same = replace(chosen, active=lambda: nullcontext(checkpoint.model))
            outcome.tuned = measure_variant(checkpoint, same, windows, options, progress, encode)
        # Slightly beyond the training length, so that the proof is quick for large models.
        tokens = windows.tokens[:1, : trained + 64].to(torch.int64).contiguous()
        plan = Plan(
            f"{chosen.name}, {chosen.summary}",
            outcome.target,
            chosen.cache_safe,
            changed=changed,
            extra=chosen.extra,
            adapter=state / "tune" / ADAPTER if options.tune and options.tune.adapter else None,
        )
        outcome.config_diff, outcome.proof = export_checkpoint(
            checkpoint, out, prover, tokens, plan
        )
        copied = {path.name for path in out.iterdir()}
        outcome.left_behind = sorted(
            path.name for path in checkpoint.folder.iterdir() if path.name not in copied
        )
