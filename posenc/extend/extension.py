"""Extend a checkpoint's context: measure all methods alike, recommend, tune, export, prove."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from posenc.command_line.errors import RunFailed, one_line
from posenc.extend.export.folder import (
    ADAPTER_FOLDER,
    ExportPlan,
    export_checkpoint,
    help_to_export,
)
from posenc.extend.export.prover import Prover
from posenc.extend.export.stock_reader import stream_layers
from posenc.extend.measure.evaluation import Evaluation, short_windows
from posenc.extend.measure.first_window import (
    FirstWindow,
    announcement,
    read_first_window,
    refuse_unknown_text,
    tokens_to_read,
)
from posenc.extend.measure.losses import LossReader, NotFinite
from posenc.extend.measure.samples import sample_windows, split_for_fitting_and_measuring
from posenc.extend.measure.tasks import Encode
from posenc.extend.options import DEFAULTS, Options, Progress
from posenc.extend.recommendation import Outcome, best_method, recommend
from posenc.extend.refusals import (
    check_after_loading,
    check_before_loading,
    with_trained_length,
)
from posenc.extend.variants import (
    DROPE,
    NUM_SEARCH_WINDOWS,
    WINDOW,
    WINDOW_IN_CONFIG,
    Variant,
    VariantBuilders,
    context_lengths,
    measure_variant,
    measure_variant_by_vectors,
    needs_search,
    only_rotation_changes,
    unchanged_variant,
    variant_builders,
)
from posenc.extend.vectors.measurement import VectorReader, make_vector_reader
from posenc.extend.vectors.recommendation import recommend_by_vectors
from posenc.files.opening import remove_folder
from posenc.hf import sharding
from posenc.hf.checkpoint.loading import Checkpoint, load_checkpoint
from posenc.hf.checkpoint.tokenization import Windows, make_text_encoder, require_mask_token_id
from posenc.hf.lora import save_adapter
from posenc.hf.model_rotation import settings_applied
from posenc.hf.restart_state import default_state_folder, folder_locked
from posenc.hf.teacher import SameWeights, Teacher
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import tune

Recommend = Callable[..., tuple[str, str]]
"""Returns the method to use and the reason; takes, after tuning, the name of the method and what
was measured then."""


class NotExported(RunFailed):
    """Raised if the export failed. `outcome` has everything that was measured before."""

    def __init__(self, reason: str, outcome: Outcome) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True)
class ExtensionRun:
    """Hold the inputs that the steps of one call of `extend` share.

    windows: the text to measure on. fitting_windows: other text, for search and tuning; None
    if neither is to run. encode: text to tokens, for tasks in words; None without a tokenizer.
    vector_reader: of a model without a head; None for one with losses.
    """

    checkpoint: Checkpoint
    windows: Windows
    fitting_windows: Windows | None
    options: Options
    progress: Progress
    encode: Encode | None
    vector_reader: VectorReader | None = None

    def measure(self, variant: Variant, progress: Progress) -> Evaluation:
        """Measure one variant of the checkpoint, and return the evaluation."""
        if self.vector_reader is not None and self.encode is not None:
            return measure_variant_by_vectors(
                self.checkpoint,
                variant,
                self.vector_reader,
                self.windows,
                self.options,
                progress,
                self.encode,
            )
        return measure_variant(
            self.checkpoint, variant, self.windows, self.options, progress, self.encode
        )


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
    out_of_domain: bool = False,
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
        out_of_domain: True if the documents were not chosen for this model, which may not know
            such text: then a high loss is no reason to recommend anything.

    Raises: TypeError unless `to` is a whole number. ValueError, with the reason, for anything that
    cannot be extended. RunFailed if `method` cannot be measured on this checkpoint; NotExported if
    the export cannot be proved.
    """
    if type(to) is not int:
        raise TypeError(f"extend: to must be a whole number of tokens, got {to!r}.")
    out = None if out is None else Path(out)
    check_before_loading(Path(folder), out, method, options)
    checkpoint = _load_in_requested_dtype(folder, options)
    if options.trained_length is not None:
        checkpoint = with_trained_length(checkpoint, options.trained_length)
    check_after_loading(
        checkpoint,
        to,
        method,
        is_exported=out is not None,
        options=options,
        can_read_words=not as_ids,
    )
    vocab_size = checkpoint.config.vocab_size
    encode = make_text_encoder(checkpoint.folder, vocab_size, as_bytes=as_bytes, as_ids=as_ids)
    vector_reader = None
    if not checkpoint.has_head:
        vector_reader = make_vector_reader(checkpoint, encode, as_bytes=as_bytes)
        options = replace(options, search_evaluations=0)  # a search compares losses
    documents_to_fit, documents_to_measure = split_for_fitting_and_measuring(documents, to)
    windows = sample_windows(encode, documents_to_measure, to, options.windows)
    fitting_windows = _fitting_windows(checkpoint, encode, documents_to_fit, to, method, options)
    if options.state is None and out is not None:
        options = replace(options, state=default_state_folder(out))
    run = ExtensionRun(
        checkpoint,
        windows,
        fitting_windows,
        options,
        progress,
        None if as_ids else encode,
        vector_reader,
    )
    first_window = _first_window(run)
    if first_window is not None and not options.anyway:
        refuse_unknown_text(first_window, was_chosen=not out_of_domain)
    with _state_lock(run), Prover() as prover:
        if out is not None and options.tune is None:
            prover.start()  # imports while variants are measured; during tuning it would only wait
        builders = variant_builders(checkpoint, to, method, fitting_windows, options, progress)
        if first_window is not None:
            progress(_time_in_words(run, len(builders), first_window), 0.0)
        is_window_written = method == WINDOW and out is not None
        needed_name = WINDOW_IN_CONFIG if is_window_written else method
        measured, not_measured = _measure_variants(run, builders, needed_name)
        recommend_method: Recommend = partial(
            recommend,
            measured,
            checkpoint.trained_length,
            options,
            windows.document_of_token.numpy(),
            out_of_domain=out_of_domain,
        )
        if not checkpoint.has_head:
            recommend_method = partial(
                recommend_by_vectors, measured, checkpoint.trained_length, options
            )
        recommended_method, reason = recommend_method()
        short_documents = short_windows(
            windows, checkpoint.trained_length
        ).document_of_token.numpy()
        outcome = Outcome(
            checkpoint, to, measured, recommended_method, reason, not_measured, short_documents
        )
        chosen_name = _method_to_export(outcome, method, options)
        if out is not None and chosen_name is not None:
            _export_and_judge(run, outcome, chosen_name, out, prover, recommend_method)
            default_folder = default_state_folder(out)
            # And not a folder of the user's choice.
            if options.state == default_folder and sharding.is_first():
                remove_folder(default_folder)
    return outcome


def _first_window(run: ExtensionRun) -> FirstWindow | None:
    """Return what the checkpoint as it is does on the first window; None if it cannot read it."""
    checkpoint = run.checkpoint
    if not checkpoint.has_head:  # vectors tell nothing of whether it knows such text
        return None
    mask_token_id = require_mask_token_id(checkpoint.folder) if checkpoint.masked else None
    reader = LossReader(checkpoint.model, mask_token_id)
    try:
        return read_first_window(reader, run.windows, checkpoint.trained_length)
    except Exception:  # measuring the unchanged model meets the same error, and reports it
        return None


def _time_in_words(run: ExtensionRun, num_variants: int, first_window: FirstWindow) -> str:
    """Return a sentence on the time that measuring, search and tuning will take."""
    options = run.options
    num_windows, length = run.windows.tokens.shape
    lengths = context_lengths(run.checkpoint.trained_length, length, options.targets)
    tokens_of_each = tokens_to_read(
        num_windows, length, lengths[:-1], run.checkpoint.trained_length
    )
    other_tokens = 0
    if run.fitting_windows is not None:
        # Two thirds of the windows score a set of frequencies, and most sets see a third of them.
        other_tokens += options.search_evaluations * NUM_SEARCH_WINDOWS // 3 * length
    if options.tune is not None:
        # A backward pass takes about twice as long as the forward pass.
        other_tokens += 3 * options.tune.steps * options.tune.batch * length
    return announcement(num_variants, tokens_of_each, other_tokens, first_window)


def _fitting_windows(
    checkpoint: Checkpoint,
    encode: Encode,
    documents: Sequence[str],
    new_length: int,
    method: str | None,
    options: Options,
) -> Windows | None:
    """Sample the windows that search and tuning read; None if neither of them is to run."""
    is_searched = bool(checkpoint.rope_settings) and needs_search(method, options)
    if not is_searched and options.tune is None:
        return None
    num_windows = NUM_SEARCH_WINDOWS  # tuning alone takes as many at least; a number chosen
    if options.tune is not None:
        num_windows = max(num_windows, options.tune.steps * options.tune.batch)
    return sample_windows(encode, documents, new_length, num_windows)


def _state_lock(run: ExtensionRun) -> AbstractContextManager[object]:
    """Return a context manager that locks the folder of the restart state, in which only search and
    tuning write; it does nothing if neither of them is to run."""
    is_written = sharding.is_first() and run.options.state is not None
    if run.fitting_windows is None or not is_written:
        return nullcontext()
    assert run.options.state is not None
    return folder_locked(run.options.state)


def _method_to_export(outcome: Outcome, method: str | None, options: Options) -> str | None:
    """Return the name of the method to tune and export; None to leave the model as it is."""
    if method == WINDOW:
        chosen_name = WINDOW_IN_CONFIG
    elif method is not None:
        chosen_name = method
    elif options.tune is not None:
        # Tuning may make a method better than what is best before it.
        chosen_name = best_method(outcome.measured, options)
    else:
        chosen_name = outcome.recommended
    # No folder says that a text is cut before the model reads it.
    return None if chosen_name in ("", "none", WINDOW) else chosen_name


def _export_and_judge(
    run: ExtensionRun,
    outcome: Outcome,
    chosen_name: str,
    out: Path,
    prover: Prover,
    recommend_method: Recommend,
) -> None:
    """Tune, write and prove a method, and record in `outcome` what became of it.

    `outcome.recommended` and `outcome.reason` are set again where a tuned model was measured.

    recommend_method: makes the recommendation again, given the name of the method and what was
        measured after tuning.

    Raises: NotExported.
    """
    try:
        tune_and_export(run, outcome, outcome.measured[chosen_name][0], out, prover)
    except RunFailed as error:
        raise NotExported(str(error), outcome) from error
    finally:
        # What was tuned is judged also where its export failed.
        if outcome.tuned is not None:
            outcome.recommended, outcome.reason = recommend_method((chosen_name, outcome.tuned))


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
    checkpoint = _load_in_requested_dtype(folder, options)
    vocab_size = checkpoint.config.vocab_size
    encode = make_text_encoder(checkpoint.folder, vocab_size, as_bytes=as_bytes, as_ids=as_ids)
    windows = sample_windows(encode, documents, length, options.windows)
    encode_words = None if as_ids else encode
    return measure_variant(
        checkpoint, unchanged_variant(checkpoint), windows, options, progress, encode_words
    )


def _load_in_requested_dtype(folder: str | Path, options: Options) -> Checkpoint:
    """Load the checkpoint in the dtype of --precision; "auto" is that of the files.

    Raises: ValueError, for a masked model, if its tokenizer has no mask token.
    """
    device = options.device if sharding.count() == 1 else "cpu"
    checkpoint = load_checkpoint(
        folder, allow_images=True, allow_no_head=True, dtype=options.precision, device=device
    )
    if sharding.count() > 1:
        sharding.shard_layers(checkpoint.model, sharding.start(options.device))
    if checkpoint.masked:
        require_mask_token_id(checkpoint.folder)  # raises before anything is measured
    return checkpoint


def _measure_variants(
    run: ExtensionRun, builders: VariantBuilders, method: str | None
) -> tuple[dict[str, tuple[Variant, Evaluation]], dict[str, str]]:
    """Measure every variant. Return the variants with their evaluations by name, and by name the
    reason why others could not be measured, so that one of them does not end a run of hours.

    Raises: ValueError or RunFailed if the unchanged model or `method`, the one that was asked for,
    cannot be measured.
    """
    measured: dict[str, tuple[Variant, Evaluation]] = {}
    not_measured: dict[str, str] = {}
    for num_done, (name, build) in enumerate(builders.items()):

        def report_progress(
            what: str, share: float, num_done: int = num_done, name: str = name
        ) -> None:
            """Report the progress of one variant as a part of the whole run."""
            run.progress(f"{name}: {what}", (num_done + share) / len(builders))

        try:
            variant = build()
            evaluation = run.measure(variant, report_progress)
        except Exception as error:  # a family's code may raise anything for what it does not expect
            is_for_the_user = isinstance(error, ValueError)
            reason = " ".join(str(error).split()) if is_for_the_user else one_line(error)
            if name == "none" and isinstance(error, NotFinite):
                raise ValueError(f"{run.checkpoint.folder}: as it is, {reason}.") from error
            if isinstance(error, OSError) and name == method:  # of the disk, not of the model
                raise
            if name in ("none", method):
                raise RunFailed(f"{name} cannot be measured on this model: {reason}") from error
            not_measured[name] = reason
        else:
            measured[name] = (variant, evaluation)
    return measured, not_measured


def tune_and_export(
    run: ExtensionRun, outcome: Outcome, chosen_variant: Variant, out: Path, prover: Prover
) -> None:
    """Tune a measured variant if requested, write it to `out` and prove it; the results are put
    into `outcome`."""
    checkpoint = run.checkpoint
    tune_config = run.options.tune
    # A model without rope settings has a table of learned positions, which is among its weights:
    # every method that extends it changes them.
    weights_changed = tune_config is not None or not checkpoint.rope_settings
    teacher = _teacher(run, chosen_variant)  # before the model is stretched
    # A map of positions is a server's: its config is written for the model as trained.
    stretched_model = settings_applied(checkpoint.model, chosen_variant.settings, outcome.target)
    with stretched_model if chosen_variant.server_keys else chosen_variant.applied():
        if tune_config is not None:
            outcome.tuning_losses = _tune_stretched_model(run, chosen_variant, tune_config, teacher)
        if weights_changed and not sharding.is_sharded(checkpoint.model):
            _round_to_stored_dtype(checkpoint)
        if tune_config is not None:
            tuned_variant = replace(chosen_variant, applied=lambda: nullcontext(checkpoint.model))
            outcome.tuned = run.measure(tuned_variant, run.progress)
        # Slightly beyond the training length, so that the proof is quick for large models.
        tokens = run.windows.tokens[:1, : checkpoint.trained_length + 64]
        tokens = tokens.to(torch.int64).contiguous()
        if not sharding.is_first():
            help_to_export(checkpoint.model, tokens)
            return
        plan = _export_plan(run, outcome, chosen_variant, weights_changed=weights_changed)
        outcome.config_diff, outcome.proof = export_checkpoint(
            checkpoint, out, prover, tokens, plan
        )
        outcome.files_not_copied = _names_not_copied(checkpoint.folder, out)


def _teacher(run: ExtensionRun, chosen_variant: Variant) -> Teacher | None:
    """Return the original model, whose predictions on short texts tuning keeps; None to learn only
    from the text."""
    checkpoint = run.checkpoint
    tune_config = run.options.tune
    if tune_config is None or not tune_config.distill or checkpoint.masked:
        return None
    if tune_config.lora_rank and only_rotation_changes(checkpoint, chosen_variant.name):
        return SameWeights(checkpoint.model)
    # On the CPU its weights are the folder's files, mapped: no memory holds them a second time.
    original = load_checkpoint(checkpoint.folder, allow_images=True, dtype=run.options.precision)
    if checkpoint.model.device.type != "cpu":
        stream_layers(original.model, str(checkpoint.model.device))
    return Teacher(original.model)


def _export_plan(
    run: ExtensionRun, outcome: Outcome, chosen_variant: Variant, *, weights_changed: bool
) -> ExportPlan:
    """Return the description of the export. weights_changed: True if the weights in memory are not
    those of the checkpoint's folder."""
    tune_config = run.options.tune
    return ExportPlan(
        f"{chosen_variant.name}, {chosen_variant.summary}",
        outcome.target,
        chosen_variant.cache_safe,
        weights_changed=weights_changed,
        server_keys=chosen_variant.server_keys,
        has_window=chosen_variant.name == WINDOW_IN_CONFIG,
        adapter_folder=_adapter_folder(run)
        if tune_config is not None and tune_config.adapter
        else None,
    )


def _names_not_copied(folder: Path, out: Path) -> list[str]:
    """Return the sorted names of files in the old folder that the new one lacks."""
    copied_names = {path.name for path in out.iterdir()}
    return sorted(path.name for path in folder.iterdir() if path.name not in copied_names)


def _tune_stretched_model(
    run: ExtensionRun, chosen_variant: Variant, tune_config: TuneConfig, teacher: Teacher | None
) -> list[float]:
    """Tune the stretched model in place and return the losses. teacher: gives the model before it
    was stretched, whose predictions are kept; None to learn only from the text."""
    checkpoint = run.checkpoint
    assert run.fitting_windows is not None
    mask_token = require_mask_token_id(checkpoint.folder) if checkpoint.masked else None
    short_share = 1.0 if chosen_variant.name == DROPE else tune_config.short_share
    return tune(
        checkpoint.model,
        run.fitting_windows,
        checkpoint.trained_length,
        replace(tune_config, short_share=short_share),
        _tuning_folder(run),
        run.progress,
        mask_token,
        teacher,
        partial(save_adapter, checkpoint.model, _adapter_folder(run), checkpoint.folder),
    )


def _tuning_folder(run: ExtensionRun) -> Path:
    """Return the folder of the restart state of tuning."""
    assert run.options.state is not None
    return run.options.state / "tune"


def _adapter_folder(run: ExtensionRun) -> Path:
    """Return the folder in which tuning saves the adapter until the export copies it."""
    return _tuning_folder(run) / ADAPTER_FOLDER


def _round_to_stored_dtype(checkpoint: Checkpoint) -> None:
    """Round the weights to the dtype of the files: what is measured is what is written."""
    stored_dtype = getattr(torch, checkpoint.stored_dtype)
    for weight in checkpoint.model.parameters():
        weight.data = weight.data.to(stored_dtype)
