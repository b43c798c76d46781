"""Choose the variants of a checkpoint that a request asks for, and measure them."""

from collections.abc import Callable
from functools import partial

from posenc.extend.measure.evaluation import Evaluation, PasskeyGrid, measure_reader
from posenc.extend.measure.losses import Reader
from posenc.extend.measure.tasks import PASSKEY, Encode, TaskGrid, check_tasks
from posenc.extend.options import Options, Progress
from posenc.extend.search.evolution import Search
from posenc.extend.variants.methods import METHODS
from posenc.extend.variants.position_maps import DUAL_CHUNK, position_maps
from posenc.extend.variants.variant import (
    DROPE,
    WINDOW,
    Variant,
    as_is,
    dropped_variant,
    rope_variant,
    searched_variant,
    table_variant,
    window_variant,
)
from posenc.hf import tables
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.checkpoint.text import Windows, mask_token

SEARCH_WINDOWS = 36
Builders = dict[str, Callable[[], Variant]]
"""Functions that build each variant, by name. Building may take long, or fail."""


def needs_search(method: str | None, options: Options) -> bool:
    """Return True if frequencies are to be searched, provided that the checkpoint has any."""
    return method == "search" or (method is None and options.search_evaluations > 0)


def candidates(
    checkpoint: Checkpoint,
    to: int,
    method: str | None,
    fitting: Windows | None,
    options: Options,
    progress: Progress,
) -> Builders:
    """Return the variants to measure: the unchanged model, `method` (None: every method) and a
    sliding window."""
    found: Builders = {"none": partial(as_is, checkpoint)}
    if checkpoint.rotary:
        for name in METHODS if method is None else {method} & METHODS.keys():
            if name != "none":
                found[name] = partial(rope_variant, checkpoint, name, to)
        if needs_search(method, options):
            assert fitting is not None
            found["search"] = partial(_search, checkpoint, to, fitting, options, progress)
        if method == DROPE:
            found[DROPE] = partial(dropped_variant, checkpoint, to)
        if method in (None, DUAL_CHUNK):
            for variant in position_maps(checkpoint, to):
                if method in (None, variant.name):
                    found[variant.name] = lambda variant=variant: variant
    else:
        for name in tables.METHODS if method is None else {method} & tables.METHODS.keys():
            found[name] = partial(table_variant, checkpoint, name, to)
    if not checkpoint.masked:
        found[WINDOW] = partial(window_variant, checkpoint)
    return found


def _search(
    checkpoint: Checkpoint, to: int, fitting: Windows, options: Options, progress: Progress
) -> Variant:
    state = None if options.state is None else options.state / "search.json"
    masked = mask_token(checkpoint.folder) if checkpoint.masked else None
    search = Search(
        Reader(checkpoint.model, masked),
        checkpoint.rotary,
        fitting.take(SEARCH_WINDOWS),
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
    length, trained = windows.tokens.shape[1], checkpoint.trained_length
    contexts = tuple(sorted({c for c in _doublings(trained // 4, length) if c > options.targets}))
    lengths = tuple(_doublings(trained, length))
    masked = mask_token(checkpoint.folder) if checkpoint.masked else None
    if variant.limit is not None:
        contexts = tuple(c for c in contexts if c <= variant.limit)
        lengths = tuple(n for n in lengths if n <= variant.limit)
    names, trials = check_tasks(options.task), options.task_trials
    grid = PasskeyGrid(lengths, trials=trials) if PASSKEY in names else None
    in_words = tuple(name for name in names if name != PASSKEY)
    tasks = None if encode is None else TaskGrid(in_words, lengths, encode, trials)
    only_losses = masked is not None or variant.window is not None
    with variant.active() as model:
        reader = Reader(model, masked, not variant.cache_safe, variant.limit, variant.window)
        return measure_reader(
            reader,
            windows,
            trained,
            contexts=() if only_losses else contexts,
            targets=options.targets,
            passkey=None if only_losses else grid,
            tasks=None if only_losses else tasks,
            short_text=variant.window is None,
            entropy=not variant.needs_runtime,
            progress=progress,
        )


def _doublings(start: int, stop: int) -> list[int]:
    """Return start, 2 start, 4 start ... below stop, and stop."""
    lengths, start = [], max(1, start)
    while start < stop:
        lengths.append(start)
        start *= 2
    return [*lengths, stop]
