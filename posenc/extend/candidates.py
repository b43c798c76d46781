"""The variants of a checkpoint that a request asks for, and what is measured of each."""

from __future__ import annotations

from dataclasses import replace

from posenc.extend.measure.evaluation import Evaluation, PasskeyGrid
from posenc.extend.measure.evaluation import evaluate as measure
from posenc.extend.measure.losses import Reader
from posenc.extend.methods import METHODS
from posenc.extend.options import Options, Progress
from posenc.extend.search.evolution import Search
from posenc.extend.variants import (
    Variant,
    position_maps,
    rope_variant,
    searched,
    table_variant,
    window_variant,
)
from posenc.hf import rope_config, tables
from posenc.hf.loading import Checkpoint
from posenc.hf.text import Windows, mask_token

SEARCH_WINDOWS = 36


def needs_search(method: str | None, options: Options) -> bool:
    """Whether frequencies are searched, where the checkpoint has any."""
    return method == "search" or (method is None and options.search_minutes > 0)


def candidates(
    checkpoint: Checkpoint,
    to: int,
    method: str | None,
    fitting: Windows | None,
    options: Options,
    progress: Progress,
) -> list[Variant]:
    """The model as it is, with a window, and with the method, or with all where there is none."""
    baselines = [] if checkpoint.masked else [window_variant(checkpoint)]
    if not rope_config.read(checkpoint.config):
        chosen = tables.METHODS if method is None else [method]
        names = ["none", *(name for name in chosen if name != "none")]
        return [table_variant(checkpoint, name, to) for name in names] + baselines
    names = ["none", method] if method in METHODS and method != "none" else ["none"]
    if method is None:
        names = list(METHODS)
    variants = [rope_variant(checkpoint, name, to) for name in names]
    if needs_search(method, options):
        variants.append(_search(checkpoint, to, fitting, options, progress))
    if method is None:
        variants += position_maps(checkpoint, to)
    return variants + baselines


def _search(
    checkpoint: Checkpoint, to: int, fitting: Windows | None, options: Options, progress: Progress
) -> Variant:
    assert fitting is not None
    settings = rope_config.read(checkpoint.config)
    state = None if options.state is None else options.state / "search.json"
    masked = mask_token(checkpoint.folder) if checkpoint.masked else None
    search = Search(
        Reader(checkpoint.model, masked), settings, fitting.take(SEARCH_WINDOWS),
        checkpoint.trained_length, state,
    )  # fmt: skip
    return searched(checkpoint, search.run(60 * options.search_minutes, progress), to)


def measure_variant(
    checkpoint: Checkpoint,
    variant: Variant,
    windows: Windows,
    trained: int,
    options: Options,
    progress: Progress,
) -> Evaluation:
    """All that is measured of one variant on windows of the new length. The trained length is
    given, because a config that is being extended names the new one."""
    length = windows.tokens.shape[1]
    contexts = tuple(sorted({c for c in _doublings(trained // 4, length) if c > options.targets}))
    grid = PasskeyGrid(tuple(_doublings(trained, length)), trials=options.passkey_trials)
    masked = mask_token(checkpoint.folder) if checkpoint.masked else None
    if variant.limit is not None:
        contexts = tuple(c for c in contexts if c <= variant.limit)
        grid = replace(grid, lengths=tuple(n for n in grid.lengths if n <= variant.limit))
    losses_alone = masked is not None or variant.window is not None
    with variant.active() as model:
        reader = Reader(model, masked, not variant.cache_safe, variant.limit, variant.window)
        return measure(
            reader, windows, trained, contexts=() if losses_alone else contexts,
            targets=options.targets, passkey=None if losses_alone else grid,
            entropy=not variant.needs_runtime, progress=progress,
        )  # fmt: skip


def _doublings(start: int, stop: int) -> list[int]:
    lengths = []
    while start < stop:
        lengths.append(start)
        start *= 2
    return [*lengths, stop]
