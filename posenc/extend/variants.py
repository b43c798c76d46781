"""Variants of a checkpoint: the same weights with other positions, measured and exported alike.

`variant_builders` chooses those that a request asks for, and `measure_variant` measures one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.encodings import DualChunk, PositionMap, ReRoPE, SelfExtend
from posenc.extend.frequency_search import FrequencySearch, SearchResult, apply_genome
from posenc.extend.measure.evaluation import Evaluation, PasskeyGrid, measure_losses_and_tasks
from posenc.extend.measure.losses import LossReader, logits_or_states
from posenc.extend.measure.tasks import PASSKEY, Encode, TaskGrid, parse_task_names
from posenc.extend.methods import METHODS, stretch
from posenc.extend.options import Options, Progress
from posenc.extend.vectors.measurement import VectorReader, measure_vectors
from posenc.frequencies.scalings.registry import Linear
from posenc.hf import learned_tables
from posenc.hf.attachment.attach import attached
from posenc.hf.attachment.attention import attention_is_replaceable
from posenc.hf.attachment.stacks import ForwardWithHooksFailed
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.checkpoint.tokenization import Windows, require_mask_token_id
from posenc.hf.model_rotation import rotation_dropped, settings_applied
from posenc.hf.rope_settings import RopeSetting, head_dim_of
from posenc.hf.sliding_window import reads_window, why_no_window, window_in_every_layer

WINDOW, WINDOW_IN_CONFIG = "window", "sliding-window"
"""Names of the model that reads only the last tokens of a text, and of the one whose config lets
every layer attend to the last tokens only."""
DROPE, DUAL_CHUNK = "drope", "dual-chunk"
"""Names of the model without its rotation, and of dual chunk attention."""
NUM_SEARCH_WINDOWS = 36
"""Windows for a search, of which a third is for its finalists; chosen, not derived."""
MAX_COMPARED_TOKENS = 128
"""Most tokens on which a map is compared with the model itself."""
MAP_TOLERANCE, MAP_LAST_BITS = 1e-3, 16
"""Largest allowed difference of a logit, relative to the largest logit, and in half precision at
least this many last bits. Rounding is far below, another rotation far above."""


@dataclass(frozen=True)
class Variant:
    """Describe a checkpoint with one method of extending.

    name, summary: of the method.
    applied: returns a context manager that yields the model with the method applied, and restores
        the model afterwards.
    settings: the rotary settings of the method; empty if it writes none.
    cache_safe: True if step-by-step decoding equals the full pass.
    needs_special_runtime: True if stock tools cannot load it.
    max_tokens: the most tokens that it can read; None for any number.
    window_length: each token is read with at most this many tokens, itself included; None for all.
    server_keys: keys of config.json, with their values, by which a server runs it.
    """

    name: str
    summary: str
    applied: Callable[[], AbstractContextManager[nn.Module]]
    settings: tuple[RopeSetting, ...] = ()
    cache_safe: bool = True
    needs_special_runtime: bool = False
    max_tokens: int | None = None
    window_length: int | None = None
    server_keys: Mapping[str, Any] = field(default_factory=dict)


VariantBuilders = dict[str, Callable[[], Variant]]
"""Functions that build each variant, by name. Building may take long, or fail."""


def needs_search(method: str | None, options: Options) -> bool:
    """Return True if the request includes a search of frequencies, for checkpoints that have
    any."""
    return method == "search" or (method is None and options.search_evaluations > 0)


def only_rotation_changes(checkpoint: Checkpoint, method: str | None) -> bool:
    """Return True if a method changes no more of the model than its rotary modules; None stands for
    the method that the command chooses. DroPE and longer tables change more."""
    return bool(checkpoint.rope_settings) and method != DROPE


def variant_builders(
    checkpoint: Checkpoint,
    target_length: int,
    method: str | None,
    fitting_windows: Windows | None,
    options: Options,
    progress: Progress,
) -> VariantBuilders:
    """Return functions that build the variants to measure: the unchanged model, `method` (None:
    every method) and a sliding window.

    target_length: the new length in tokens. fitting_windows: the text for a search; None if there
    is none.
    """
    builders: VariantBuilders = {"none": partial(unchanged_variant, checkpoint)}
    if checkpoint.rope_settings:
        builders |= _rotary_builders(
            checkpoint, target_length, method, fitting_windows, options, progress
        )
    else:
        for name in (
            learned_tables.METHODS if method is None else {method} & learned_tables.METHODS.keys()
        ):
            builders[name] = partial(lengthened_table_variant, checkpoint, name, target_length)
    if method in (None, WINDOW) and why_no_window(checkpoint) is None:
        builders[WINDOW_IN_CONFIG] = partial(window_in_config_variant, checkpoint, target_length)
    if not checkpoint.masked:
        builders[WINDOW] = partial(window_variant, checkpoint)
    return builders


def _rotary_builders(
    checkpoint: Checkpoint,
    target_length: int,
    method: str | None,
    fitting_windows: Windows | None,
    options: Options,
    progress: Progress,
) -> VariantBuilders:
    """Return functions that build the variants with other frequencies or positions in rotary
    layers, by the variants' names.

    target_length: the new length in tokens. method: the only one to build; None for all that need
    no training. fitting_windows: the text on which a search measures frequencies; None if there is
    no search.
    """
    builders: VariantBuilders = {}
    for name in METHODS if method is None else {method} & METHODS.keys():
        if name != "none":
            builders[name] = partial(rope_variant, checkpoint, name, target_length)
    if needs_search(method, options):
        assert fitting_windows is not None
        builders["search"] = partial(
            _search_for_variant, checkpoint, target_length, fitting_windows, options, progress
        )
    if method == DROPE:  # only if it is named: without tuning, it is no candidate
        builders[DROPE] = partial(drope_variant, checkpoint, target_length)
    if method in (None, DUAL_CHUNK):
        for variant in position_maps(checkpoint, target_length):
            if method in (None, variant.name):
                # Built already: making these three takes no time.
                builders[variant.name] = lambda variant=variant: variant
    return builders


def _search_for_variant(
    checkpoint: Checkpoint,
    target_length: int,
    fitting_windows: Windows,
    options: Options,
    progress: Progress,
) -> Variant:
    """Search frequencies, or go on with a search that was stopped; return the variant with the
    best."""
    state_file = None if options.state is None else options.state / "search.json"
    mask_token_id = require_mask_token_id(checkpoint.folder) if checkpoint.masked else None
    search = FrequencySearch(
        LossReader(checkpoint.model, mask_token_id),
        checkpoint.rope_settings,
        fitting_windows.take(NUM_SEARCH_WINDOWS),
        checkpoint.trained_length,
        state_file,
    )
    return searched_variant(
        checkpoint, search.evolve(options.search_evaluations, progress), target_length
    )


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
    max_length = windows.tokens.shape[1] if variant.max_tokens is None else variant.max_tokens
    lengths = [n for n in _doublings(train_length, windows.tokens.shape[1]) if n <= max_length]
    lengths_of_contexts = [
        n
        for n in context_lengths(train_length, windows.tokens.shape[1], options.targets)
        if n <= max_length
    ]
    mask_token_id = require_mask_token_id(checkpoint.folder) if checkpoint.masked else None
    passkey_grid, task_grid = _task_grids(tuple(lengths), options, encode)
    # Neither a masked model nor a window is asked for what stands far back.
    measures_only_losses = mask_token_id is not None or variant.window_length is not None
    if measures_only_losses:
        lengths_of_contexts = []
        passkey_grid = None
        task_grid = None
    with variant.applied() as model:
        reader = LossReader(
            model, mask_token_id, not variant.cache_safe, variant.max_tokens, variant.window_length
        )
        return measure_losses_and_tasks(
            reader,
            windows,
            train_length,
            context_lengths=tuple(lengths_of_contexts),
            num_targets=options.targets,
            passkey_grid=passkey_grid,
            task_grid=task_grid,
            reads_short_texts=variant.window_length is None,
            measures_entropy=not variant.needs_special_runtime,
            progress=progress,
        )


def measure_variant_by_vectors(
    checkpoint: Checkpoint,
    variant: Variant,
    reader: VectorReader,
    windows: Windows,
    options: Options,
    progress: Progress,
    encode: Encode,
) -> Evaluation:
    """Measure one variant of a checkpoint without a head. reader: of the unchanged model; the other
    arguments are those of `measure_variant`."""
    train_length = checkpoint.trained_length
    lengths = _doublings(train_length, windows.tokens.shape[1])
    if variant.max_tokens is not None:
        lengths = [length for length in lengths if length <= variant.max_tokens]
    with variant.applied() as model:
        return measure_vectors(
            replace(reader, model=model, cut_length=variant.window_length),
            windows,
            train_length,
            lengths=lengths,
            num_questions=options.windows,
            encode=encode,
            progress=progress,
        )


def _task_grids(
    lengths: tuple[int, ...], options: Options, encode: Encode | None
) -> tuple[PasskeyGrid | None, TaskGrid | None]:
    """Return the passkeys and the tasks in words that --task asks for, at these lengths in tokens;
    None for one that is not asked for. encode: None without a tokenizer."""
    task_names = parse_task_names(options.task)
    passkey_grid: PasskeyGrid | None = None
    if PASSKEY in task_names:
        passkey_grid = PasskeyGrid(lengths, num_trials=options.task_trials)
    if encode is None:
        return passkey_grid, None
    tasks_with_words = tuple(name for name in task_names if name != PASSKEY)
    return passkey_grid, TaskGrid(tasks_with_words, lengths, encode, options.task_trials)


def context_lengths(train_length: int, length: int, num_targets: int) -> list[int]:
    """Return the lengths in tokens at which the loss of the last `num_targets` tokens of a window
    of `length` tokens is measured: from a quarter of the training length, doubling."""
    return [n for n in _doublings(train_length // 4, length) if n > num_targets]


def _doublings(start: int, stop: int) -> list[int]:
    """Return start, 2 start, 4 start ... below stop, and stop."""
    lengths = []
    start = max(1, start)  # doubling 0 would never end
    while start < stop:
        lengths.append(start)
        start *= 2
    return [*lengths, stop]


def unchanged_variant(checkpoint: Checkpoint) -> Variant:
    """Return the variant that changes nothing. A position table limits the tokens it can read."""
    model = checkpoint.model
    summary = METHODS["none"].summary
    max_tokens = None if learned_tables.growable_table(model) is None else checkpoint.trained_length
    return Variant(
        "none", summary, lambda: nullcontext(model), checkpoint.rope_settings, max_tokens=max_tokens
    )


def window_variant(checkpoint: Checkpoint) -> Variant:
    """Return the baseline without extension, which reads only the last tokens (without a head: the
    first), as many as in training. A method is worth its cost only if it beats this."""
    train_length = checkpoint.trained_length
    # One vector of a text is made at once, of what sentence-transformers leaves of it.
    end = "last" if checkpoint.has_head else "first"
    summary = f"as trained, reading only the {end} {train_length} tokens"
    return Variant(
        WINDOW,
        summary,
        lambda: nullcontext(checkpoint.model),
        needs_special_runtime=True,
        window_length=train_length,
    )


def window_in_config_variant(checkpoint: Checkpoint, target_length: int) -> Variant:
    """Return the variant whose config gives every layer a window of the training length.

    Unlike the baseline, a token sees what earlier tokens have read: after n layers, n windows. A
    model that was trained without may need its first tokens (Xiao et al. 2023, arXiv:2309.17453),
    so that it is measured like any other method.

    checkpoint: one for which `why_no_window` gives no reason.

    Raises: ValueError if the model's code takes no notice of the window.
    """
    if not reads_window(checkpoint.model):
        raise ValueError("its code in transformers takes no notice of sliding_window")
    train_length = checkpoint.trained_length
    return Variant(
        WINDOW_IN_CONFIG,
        f"each layer attends to the last {train_length} tokens: sliding_window in the config",
        lambda: window_in_every_layer(checkpoint.model, train_length, target_length),
        checkpoint.rope_settings,
    )


def rope_variant(checkpoint: Checkpoint, name: str, target_length: int) -> Variant:
    """Return the variant of the method METHODS[name] for `target_length` tokens. Raises:
    ValueError where the method does not apply to this checkpoint."""
    method = METHODS[name]
    settings = stretch(checkpoint.rope_settings, method, target_length)
    max_positions = checkpoint.trained_length if method.keeps_maximum else target_length
    applied = partial(settings_applied, checkpoint.model, settings, max_positions)
    return Variant(name, method.summary, applied, settings, method.cache_safe)


def drope_variant(checkpoint: Checkpoint, target_length: int) -> Variant:
    """Return the variant of DroPE: no layer rotates, and the config allows `target_length` tokens.

    As it is, it predicts badly: it must be tuned, for which texts of the training length suffice.
    A causal mask still tells positions apart, because token i sees i + 1 keys.

    checkpoint: one for which `attentions_with_rope_switch` is not empty, see `check_after_loading`.

    Source: Gelberg et al. 2025, arXiv:2512.12167.
    """
    summary = "no layer rotates, recalibrated at the training length"
    return Variant(DROPE, summary, lambda: rotation_dropped(checkpoint.model, target_length))


def lengthened_table_variant(checkpoint: Checkpoint, name: str, target_length: int) -> Variant:
    """Return the variant with a table of learned positions lengthened to `target_length` rows by
    the method learned_tables.METHODS[name]."""
    summary = learned_tables.METHODS[name].summary
    return Variant(
        name,
        summary,
        lambda: learned_tables.lengthened_table(checkpoint.model, name, target_length),
    )


def searched_variant(
    checkpoint: Checkpoint, search_result: SearchResult, target_length: int
) -> Variant:
    """Return the variant with the frequencies that a search found, for `target_length` tokens."""
    settings = apply_genome(checkpoint.rope_settings, search_result.genome, target_length)
    factors_in_words = ", ".join(f"{f:.3g}" for f in search_result.genome.factors)
    summary = (
        f"best of {search_result.num_tried} sets of frequencies: wavelengths times "
        f"{factors_in_words}, logits times {search_result.genome.temperature**2:.3f}"
    )
    return Variant(
        "search",
        summary,
        partial(settings_applied, checkpoint.model, settings, target_length),
        settings,
    )


def position_maps(checkpoint: Checkpoint, target_length: int) -> list[Variant]:
    """Return variants of this checkpoint that map positions up to `target_length` into the training
    length. Empty if layers differ in their rotation, or the attention cannot be replaced (Falcon).

    A map that rotates otherwise than the model is returned as well: applying it raises ValueError,
    see `checked_map_attached`.
    """
    model = checkpoint.model
    # A map rotates all layers alike.
    is_alike = (
        len(checkpoint.rope_settings) == 1
        and checkpoint.rope_settings[0].layer_type is None
        and not getattr(checkpoint.config, "no_rope_layers", None)
    )
    if not is_alike or not attention_is_replaceable(model):
        return []
    setting = checkpoint.rope_settings[0]
    train_length = checkpoint.trained_length
    # Chosen, not derived.
    exact_window = train_length // 2
    chunk_size = train_length * 3 // 4
    local_window = train_length // 16
    # The fewest tokens per group with which the last one is within the training length.
    group_size = max(2, -(-(target_length - exact_window) // (train_length - exact_window)))
    scaling = setting.scaling
    if scaling is None and setting.compression != 1.0:
        scaling = Linear(setting.compression)
    rope_arguments: dict[str, Any] = {
        "head_dim": head_dim_of(checkpoint.config),
        "rope_theta": setting.rope_theta,
        "interleaved": False,
        "rotary_dim": setting.rotary_dim,
        "scaling": scaling,
    }
    maps = {
        "self-extend": SelfExtend(**rope_arguments, window=exact_window, group_size=group_size),
        "rerope": ReRoPE(**rope_arguments, window=exact_window),
        DUAL_CHUNK: DualChunk(**rope_arguments, chunk_size=chunk_size, local_window=local_window),
    }
    summaries = {
        "self-extend": f"exact to {exact_window} tokens, then groups of {group_size}",
        "rerope": f"distances stop at {exact_window} tokens",
        DUAL_CHUNK: f"chunks of {chunk_size} tokens",
    }
    chunk_sizes = {"chunk_size": chunk_size, "local_size": local_window}
    server_keys = {DUAL_CHUNK: {"dual_chunk_attention_config": chunk_sizes}}
    return [
        Variant(
            name,
            summaries[name],
            lambda e=encoding: checked_map_attached(checkpoint, e, exact_window),
            checkpoint.rope_settings,
            needs_special_runtime=True,
            server_keys=server_keys.get(name, {}),
        )
        for name, encoding in maps.items()
    ]


@contextmanager
def checked_map_attached(
    checkpoint: Checkpoint, encoding: PositionMap, window: int
) -> Iterator[nn.Module]:
    """Yield the model with a position map attached, after comparing the two on random tokens.
    Within its `window` of tokens a map must change nothing; it does if the model pairs other
    channels.

    Raises: ValueError with the difference, where there is one.
    """
    length = min(MAX_COMPARED_TOKENS, window)
    vocab_size = checkpoint.config.vocab_size
    tokens = torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    expected_logits = _logits(checkpoint.model, tokens)
    dtype = checkpoint.model.dtype
    eps = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    with ExitStack() as exit_stack:
        try:
            model = exit_stack.enter_context(
                attached(checkpoint.model, encoding, allow_other_order=True)
            )
            logits = _logits(model, tokens)
        except Exception as error:  # a family's code may raise anything with another attention
            has_stopped_in_trial = isinstance(error, ForwardWithHooksFailed)
            if isinstance(error, ValueError) and not has_stopped_in_trial:
                raise  # has a sentence for the user already
            cause = error.__cause__ or error
            attention_in_words = f"the attention of {type(checkpoint.model).__name__}"
            raise ValueError(
                f"{attention_in_words} cannot run with a map ({one_line(cause)})"
            ) from error
        error = float((logits - expected_logits).abs().max() / expected_logits.abs().max())
        if not error <= max(MAP_TOLERANCE, MAP_LAST_BITS * eps):
            raise ValueError(
                f"within its window it must change nothing, and it changes logits by {error:.1%}: "
                "this model rotates in another way than the map"
            )
        yield model


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits in float32, (batch, length, vocabulary), without a cache; of a model
    without a head the states, (batch, length, width)."""
    return logits_or_states(model(tokens.to(model.device), use_cache=False)).float()
