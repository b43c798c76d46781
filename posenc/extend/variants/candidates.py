"""Choose the variants of a checkpoint that a request asks for, and measure them."""

from collections.abc import Callable
from functools import partial

from posenc.extend.frequency_search import FrequencySearch
from posenc.extend.measure.evaluation import Evaluation, PasskeyGrid, measure_losses_and_tasks
from posenc.extend.measure.losses import LossReader
from posenc.extend.measure.tasks import PASSKEY, Encode, TaskGrid, parse_task_names
from posenc.extend.options import Options, Progress
from posenc.extend.variants.mapped_variants import DUAL_CHUNK, position_maps
from posenc.extend.variants.methods import METHODS
from posenc.extend.variants.variant import (
    DROPE,
    WINDOW,
    Variant,
    drope_variant,
    lengthened_table_variant,
    rope_variant,
    searched_variant,
    unchanged_variant,
    window_variant,
)
from posenc.hf import learned_tables
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.checkpoint.tokenization import Windows, mask_token_id

NUM_SEARCH_WINDOWS = 36
"""Windows for a search, of which a third is for its finalists; chosen, not derived."""
VariantBuilders = dict[str, Callable[[], Variant]]
"""Functions that build each variant, by name. Building may take long, or fail."""


def needs_search(method: str | None, options: Options) -> bool:
    """Return True if the request includes a search of frequencies, for checkpoints that have
    any."""
    return method == "search" or (method is None and options.search_evaluations > 0)


def variant_builders(
    checkpoint: Checkpoint,
    to: int,
    method: str | None,
    fitting: Windows | None,
    options: Options,
    progress: Progress,
) -> VariantBuilders:
    """Return functions that build the variants to measure: the unchanged model, `method` (None:
    every method) and a sliding window.

    to: the new length in tokens. fitting: the text for a search; None if there is none.
    """
    builders: VariantBuilders = {"none": partial(unchanged_variant, checkpoint)}
    if checkpoint.rope_settings:
        builders |= _rotary_builders(checkpoint, to, method, fitting, options, progress)
    else:
        for name in (
            learned_tables.METHODS if method is None else {method} & learned_tables.METHODS.keys()
        ):
            builders[name] = partial(lengthened_table_variant, checkpoint, name, to)
    if not checkpoint.masked:
        builders[WINDOW] = partial(window_variant, checkpoint)
    return builders


def _rotary_builders(
    checkpoint: Checkpoint,
    to: int,
    method: str | None,
    fitting: Windows | None,
    options: Options,
    progress: Progress,
) -> VariantBuilders:
    """Return functions that build the variants with other frequencies or positions in rotary
    layers."""
    builders: VariantBuilders = {}
    for name in METHODS if method is None else {method} & METHODS.keys():
        if name != "none":
            builders[name] = partial(rope_variant, checkpoint, name, to)
    if needs_search(method, options):
        assert fitting is not None
        builders["search"] = partial(
            _search_for_variant, checkpoint, to, fitting, options, progress
        )
    if method == DROPE:
        builders[DROPE] = partial(drope_variant, checkpoint, to)
    if method in (None, DUAL_CHUNK):
        for variant in position_maps(checkpoint, to):
            if method in (None, variant.name):
                builders[variant.name] = lambda variant=variant: variant
    return builders


def _search_for_variant(
    checkpoint: Checkpoint, to: int, fitting: Windows, options: Options, progress: Progress
) -> Variant:
    """Search frequencies, or go on with a search that was stopped; return the variant with the
    best."""
    state = None if options.state is None else options.state / "search.json"
    masked = mask_token_id(checkpoint.folder) if checkpoint.masked else None
    search = FrequencySearch(
        LossReader(checkpoint.model, masked),
        checkpoint.rope_settings,
        fitting.take(NUM_SEARCH_WINDOWS),
        checkpoint.trained_length,
        state,
    )
    return searched_variant(checkpoint, search.evolve(options.search_evaluations, progress), to)


def measure_variant(
    checkpoint: Checkpoint,
    variant: Variant,
    windows: Windows,
    options: Options,
    progress: Progress,
    encode: Encode | None = None,
) -> Evaluation:
    """Measure one variant on windows of the new length. encode: text to tokens, for tasks in words;
    None without a tokenizer."""
    train_length = checkpoint.trained_length
    longest = windows.tokens.shape[1] if variant.max_tokens is None else variant.max_tokens
    lengths = [n for n in _doublings(train_length, windows.tokens.shape[1]) if n <= longest]
    context_lengths = [
        n
        for n in _doublings(train_length // 4, windows.tokens.shape[1])
        if options.targets < n <= longest
    ]
    masked = mask_token_id(checkpoint.folder) if checkpoint.masked else None
    passkey, tasks = _task_grids(tuple(lengths), options, encode)
    # Neither a masked model nor a window is asked for what stands far back.
    only_losses = masked is not None or variant.window is not None
    if only_losses:
        context_lengths = []
        passkey = None
        tasks = None
    with variant.applied() as model:
        reader = LossReader(
            model, masked, not variant.cache_safe, variant.max_tokens, variant.window
        )
        return measure_losses_and_tasks(
            reader,
            windows,
            train_length,
            context_lengths=tuple(context_lengths),
            num_targets=options.targets,
            passkey_grid=passkey,
            task_grid=tasks,
            reads_short_texts=variant.window is None,
            measures_entropy=not variant.needs_special_runtime,
            progress=progress,
        )


def _task_grids(
    lengths: tuple[int, ...], options: Options, encode: Encode | None
) -> tuple[PasskeyGrid | None, TaskGrid | None]:
    """Return the passkeys and the tasks in words that --task asks for, at these lengths in tokens;
    None for one that is not asked for. encode: None without a tokenizer."""
    names = parse_task_names(options.task)
    passkey: PasskeyGrid | None = None
    if PASSKEY in names:
        passkey = PasskeyGrid(lengths, trials=options.task_trials)
    if encode is None:
        return passkey, None
    in_words = tuple(name for name in names if name != PASSKEY)
    return passkey, TaskGrid(in_words, lengths, encode, options.task_trials)


def _doublings(start: int, stop: int) -> list[int]:
    """Return start, 2 start, 4 start ... below stop, and stop."""
    lengths = []
    start = max(1, start)  # doubling 0 would never end
    while start < stop:
        lengths.append(start)
        start *= 2
    return [*lengths, stop]
