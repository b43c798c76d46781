"""Evaluate a checkpoint: loss by position and by context, passkeys, attention entropy."""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posenc.extend.measure.losses import LossReader
from posenc.extend.measure.tasks import PasskeyGrid, TaskGrid, TaskScore
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.chunked_logits import call_without_cache
from posenc.hf.transformers_compat import arguments_for_next_step
from posenc.statistics.text_intervals import Estimate, estimate_mean

MAX_SHORT_TEXTS = 64
"""Short texts that are read, at most."""
MAX_QUERIES_AT_ONCE = 256
"""Queries whose attention is computed at a time, to measure its entropy."""
MAX_SCORES_AT_ONCE = 1 << 23
"""Attention scores in memory at once."""
ENTROPY_IMPLEMENTATION = "posenc_entropy"
"""The name under which `attention_entropy` registers its attention with transformers."""


@dataclass(frozen=True)
class VectorScores:
    """Hold what was measured of one variant of a model without a head.

    short_vectors: of the short texts, (texts, width), each of length 1.
    ranks: for each length in tokens, the rank of the right text for each question, (questions): 1
        is the nearest, and half a rank is a tie.
    """

    short_vectors: np.ndarray
    ranks: dict[int, np.ndarray]

    def share_found(self, length: int) -> float:
        """Return the fraction of questions whose right text of `length` tokens is the nearest."""
        return float((self.ranks[length] == 1).mean())


@dataclass(frozen=True)
class Evaluation:
    """Hold all that was measured for one variant of a checkpoint; losses in nats per token.

    edges: of the buckets of positions, in tokens, from 0 to the length of the windows.
    loss_by_position: the mean loss in each bucket.
    loss_by_context: the mean loss of the last tokens of the windows, by the length of the context.
    seconds: how long the measurements took.
    """

    edges: tuple[int, ...]
    loss_by_position: tuple[Estimate, ...]
    loss_by_context: dict[int, Estimate] = field(default_factory=dict)
    passkey_shares: dict[tuple[int, float], float] = field(default_factory=dict)
    """Fraction of passkey tokens that are right, by (length, depth); depth 0 is the start of the
    context."""
    entropy_by_bucket: tuple[float, ...] = ()
    """Mean entropy of attention in nats, by bucket of `edges`; empty if the model does not
    expose it."""
    task_scores: dict[tuple[str, int], TaskScore] = field(default_factory=dict)
    """The score of each task in words, by (task, length)."""
    tasks_left_out: dict[tuple[str, int], str] = field(default_factory=dict)
    """Reasons why a task has no score, by (task, length)."""
    short_text_losses: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Losses of short texts read by themselves, (texts, training length); None if not measured."""
    losses: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Losses of every token by window and position, NaN for tokens that are not predicted."""
    seconds: float = 0.0
    vectors: VectorScores | None = field(default=None, repr=False, compare=False)
    """What was measured of a model without a head, of which there is no loss; None for others."""

    def mean_within(self, train_length: int) -> float:
        """Return the mean loss per token, in nats, at positions within the training length
        `train_length`."""
        return _mean_over_tokens(self, lambda edge: edge <= train_length)

    def mean_beyond(self, train_length: int) -> float:
        """Return the mean loss per token, in nats, at positions beyond the training length
        `train_length`."""
        return _mean_over_tokens(self, lambda edge: edge > train_length)

    def mean_over_buckets(self) -> float:
        """Return the mean loss over buckets, each with the same weight; inf if any bucket could not
        be evaluated."""
        if not all(e.tokens for e in self.loss_by_position):
            return math.inf
        return sum(e.mean for e in self.loss_by_position) / len(self.loss_by_position)


def _mean_over_tokens(evaluation: Evaluation, keep: Callable[[int], bool]) -> float:
    """Return the mean loss over all tokens of the buckets whose upper edge `keep` accepts; NaN if
    one of these buckets has no tokens."""
    estimates = [
        estimate
        for edge, estimate in zip(evaluation.edges[1:], evaluation.loss_by_position, strict=True)
        if keep(edge)
    ]
    num_tokens = sum(estimate.tokens for estimate in estimates)
    if not num_tokens or not all(estimate.tokens for estimate in estimates):
        return math.nan
    return sum(estimate.mean * estimate.tokens for estimate in estimates) / num_tokens


def position_edges(train_length: int, target_length: int) -> tuple[int, ...]:
    """Return the edges of the buckets of positions, from 0 to `target_length` tokens: a quarter,
    half and all of the training length, then 1.5, 2, 3, 4, 6, 8 ... times it."""
    edges = [0, train_length // 4, train_length // 2, train_length]
    doubling = 1
    while edges[-1] < target_length:
        edges += [train_length * doubling * 3 // 2, train_length * doubling * 2]
        doubling *= 2
    return tuple(sorted({e for e in edges if e < target_length} | {target_length}))


def measure_losses_and_tasks(
    reader: LossReader,
    windows: Windows,
    train_length: int,
    *,
    context_lengths: tuple[int, ...] = (),
    num_targets: int = 64,
    passkey_grid: PasskeyGrid | None = None,
    task_grid: TaskGrid | None = None,
    reads_short_texts: bool = False,
    measures_entropy: bool = True,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Evaluation:
    """Measure one variant of a checkpoint on packed windows of the target length.

    Args:
        reader: the model and how to read it.
        windows: tokens, each window as long as the target length.
        train_length: the length the checkpoint was trained at, in tokens.
        context_lengths: lengths at which the loss of the same last `num_targets` tokens is
            measured, on the first half of the windows.
        passkey_grid: passkeys to test; None for none.
        task_grid: tasks in words to test; None for none.
        num_targets: number of tokens at the end of a window whose loss is measured by context.
        reads_short_texts: True to read texts of the training length by themselves, too, see
            `mean_loss_rise`.
        measures_entropy: True to measure the entropy of attention on the first window.
        progress: called with the current measurement and the fraction done.
    """
    start_time = time.perf_counter()
    length = windows.tokens.shape[1]
    edges = position_edges(train_length, length)
    losses = _losses_of_windows(reader, windows, progress)
    document_of_token = windows.document_of_token.numpy()
    loss_by_position = tuple(
        estimate_mean(losses[:, low:high], document_of_token[:, low:high])
        for low, high in itertools.pairwise(edges)
    )
    loss_by_context = {}
    first_half = slice((len(windows) + 1) // 2)
    for i, context_length in enumerate(context_lengths):
        if context_length == length:
            # With all of the window before them, the targets were read above.
            context_losses = losses[first_half]
        else:
            context_losses = reader.losses_in_batches(
                windows.tokens[first_half, -context_length:]
            ).numpy()
        loss_by_context[context_length] = estimate_mean(
            context_losses[:, -num_targets:], document_of_token[first_half, -num_targets:]
        )
        progress("loss by context", (i + 1) / len(context_lengths))
    passkey_shares = (
        {} if passkey_grid is None else passkey_grid.accuracies(reader, windows, progress)
    )
    entropy_by_bucket = _entropy_by_bucket(reader, windows, edges) if measures_entropy else ()
    task_scores = {}
    tasks_left_out = {}
    if task_grid is not None:
        task_scores, tasks_left_out = task_grid.scores(reader, windows.tokens.flatten(), progress)
    short_text_losses = None
    if reads_short_texts:
        short_text_losses = reader.losses_in_batches(
            short_windows(windows, train_length).tokens
        ).numpy()
    return Evaluation(
        edges,
        loss_by_position,
        loss_by_context,
        passkey_shares,
        entropy_by_bucket,
        task_scores,
        tasks_left_out,
        short_text_losses,
        losses,
        seconds=time.perf_counter() - start_time,
    )


def _losses_of_windows(
    reader: LossReader, windows: Windows, progress: Callable[[str, float], None]
) -> np.ndarray:
    """Return the loss of every token in nats, (windows, length); NaN for tokens that are not
    predicted."""
    losses = []
    # About eight parts, so that progress is shown on the way.
    for part in windows.tokens.split(max(1, len(windows) // 8)):
        losses.append(reader.losses_in_batches(part).numpy())
        progress("loss by position", sum(map(len, losses)) / len(windows))
    return np.concatenate(losses)


def _entropy_by_bucket(
    reader: LossReader, windows: Windows, edges: tuple[int, ...]
) -> tuple[float, ...]:
    """Return the mean entropy of attention in the first window, by bucket; () if the model does not
    expose it."""
    tokens = windows.tokens[:1, : reader.max_tokens]
    in_one_piece = reader.in_one_piece or reader.mask_token_id is not None
    entropies = attention_entropy(reader.model, tokens, in_one_piece=in_one_piece)
    if entropies is None:
        return ()
    return tuple(float(entropies[a:b].mean()) for a, b in itertools.pairwise(edges))


def short_windows(windows: Windows, train_length: int) -> Windows:
    """Cut the windows into texts of the training length, equally many from every window."""
    num_pieces = windows.tokens.shape[1] // train_length
    pieces_per_window = max(1, min(num_pieces, MAX_SHORT_TEXTS // len(windows)))
    tokens = windows.tokens[:, : pieces_per_window * train_length].reshape(-1, train_length)
    document_of_token = windows.document_of_token[:, : pieces_per_window * train_length].reshape(
        -1, train_length
    )
    return Windows(tokens[:MAX_SHORT_TEXTS], document_of_token[:MAX_SHORT_TEXTS])


def mean_loss_rise(
    losses_before: np.ndarray, losses_after: np.ndarray, document_of_token: np.ndarray
) -> Estimate:
    """Return the mean of `losses_after` minus `losses_before`, the losses of the same tokens in
    nats, with a 95 % interval from resampled documents. Above 0, the texts are predicted worse."""
    return estimate_mean(losses_after - losses_before, document_of_token)


@torch.inference_mode()
def attention_entropy(model: Any, tokens: Tensor, *, in_one_piece: bool = False) -> Tensor | None:
    """Return the entropy of attention at each position in nats, (length), the mean over layers and
    heads; None if the model's attention does not go through transformers' interface.

    A sink logit counts as one more key. Tokens are read in pieces through the model's cache, so
    that no mask of length times length is held. in_one_piece: True to read them at once, for models
    without an exact cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    tokens = tokens.to(model.device)
    entropy_of_layers: list[Tensor] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention as transformers' interface asks for it, and keep the layer's
        entropy."""
        out, entropy = _attend_with_entropy(module, query, key, value, attention_mask, kwargs)
        entropy_of_layers.append(entropy)
        return out.transpose(1, 2).contiguous(), None

    previous_implementation = model.config._attn_implementation
    AttentionInterface.register(ENTROPY_IMPLEMENTATION, attend)
    AttentionMaskInterface.register(ENTROPY_IMPLEMENTATION, sdpa_mask)
    try:
        model.set_attn_implementation(ENTROPY_IMPLEMENTATION)
        entropy_pieces: list[Tensor] = []
        cache_arguments: dict[str, Any] = {"use_cache": True}
        for piece in [tokens] if in_one_piece else tokens.split(MAX_QUERIES_AT_ONCE, dim=1):
            if in_one_piece:
                call_without_cache(model, piece)
            else:
                out = model(piece, **cache_arguments)
                cache_arguments = arguments_for_next_step(model, out)
            if not entropy_of_layers:
                return None
            entropy_pieces.append(
                torch.stack(
                    [layer_entropy.float().cpu() for layer_entropy in entropy_of_layers]
                ).mean(0)
            )
            entropy_of_layers.clear()
    except ValueError:  # its attention cannot be replaced
        return None
    finally:
        model.set_attn_implementation(previous_implementation)
    return torch.cat(entropy_pieces)


def _attend_with_entropy(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return what transformers' attention returns, (batch, num_heads, rows, head_dim), and the mean
    entropy of each row, (rows). options: the other arguments of its interface."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    is_causal = getattr(module, "is_causal", True) and mask is None
    num_key_heads = key.shape[1]
    keys_transposed = key.float().mT
    out = torch.empty_like(query[..., : value.shape[-1]])
    entropy = query.new_zeros(query.shape[2], dtype=torch.float32)
    first_query = key.shape[2] - query.shape[2]  # of the queries, among the keys
    step = max(
        1, min(MAX_QUERIES_AT_ONCE, MAX_SCORES_AT_ONCE // (query.shape[:2].numel() * key.shape[2]))
    )
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        # Queries that share a key head are rows of one product, so that no key is copied for them.
        queries = query[:, :, rows].float()
        queries_by_key_head = queries.unflatten(1, (num_key_heads, -1)).flatten(2, 3)
        scores = (queries_by_key_head @ keys_transposed).view(*queries.shape[:3], -1) * scale
        if options.get("softcap") is not None:
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        if mask is not None:
            scores = scores.masked_fill(~_boolean_mask(mask[:, :, rows]), -torch.inf)
        elif is_causal:
            is_seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~is_seen.tril(first_query + start), -torch.inf)
        weights = _append_sinks(scores, options.get("s_aux")).softmax(-1)
        entropy[rows] = torch.special.entr(weights).sum(-1).mean((0, 1))
        weights_of_keys = weights[..., : key.shape[2]].to(value.dtype)
        weights_by_key_head = weights_of_keys.unflatten(1, (num_key_heads, -1)).flatten(2, 3)
        out[:, :, rows] = (weights_by_key_head @ value).view(*queries.shape[:3], -1)
    return out, entropy


def _boolean_mask(mask: Tensor) -> Tensor:
    """Return the mask as booleans, True where a query sees a key."""
    if mask.dtype == torch.bool:
        return mask
    return mask == 0  # added to the scores, as in OPT in early releases of transformers 5


def _append_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the scores with the sink logit of each head as one more key at the end."""
    if sinks is None:
        return scores
    sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1)
