"""What a checkpoint does with its positions: loss by position, by context, passkeys, attention
entropy."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.checkpoints.text import Windows
from posenc.hf.entropy import attention_entropy
from posenc.hf.losses import masked_token_losses, next_token_losses

BOOTSTRAPS = 200


@dataclass(frozen=True)
class Estimate:
    """A token-weighted mean with a 95 % bootstrap interval over documents."""

    mean: float
    low: float
    high: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 50.0))


@dataclass(frozen=True)
class Evaluation:
    """All that was measured for one variant of a checkpoint; losses in nats per token."""

    edges: tuple[int, ...]
    by_position: tuple[Estimate, ...]
    by_context: dict[int, Estimate] = field(default_factory=dict)
    passkey: dict[tuple[int, float], float] = field(default_factory=dict)
    """Share of passkey tokens right, by (length, depth); depth 0 is the start of the context."""
    entropy: tuple[float, ...] = ()
    """Mean entropy of attention in nats, in the buckets of `edges`; empty where the model does not
    show it."""
    seconds: float = 0.0

    def short(self, trained: int) -> float:
        """Mean loss within the trained length."""
        return _pooled(self, lambda edge: edge <= trained)

    def long(self, trained: int) -> float:
        """Mean loss beyond the trained length."""
        return _pooled(self, lambda edge: edge > trained)

    def average(self) -> float:
        """Mean over buckets, each counting the same; infinite where one could not be read."""
        if not all(e.tokens for e in self.by_position):
            return math.inf
        return sum(e.mean for e in self.by_position) / len(self.by_position)


def _pooled(evaluation: Evaluation, keep: Callable[[int], bool]) -> float:
    kept = [
        e
        for edge, e in zip(evaluation.edges[1:], evaluation.by_position, strict=True)
        if keep(edge)
    ]
    tokens = sum(e.tokens for e in kept)
    if not tokens or not all(e.tokens for e in kept):
        return math.nan
    return sum(e.mean * e.tokens for e in kept) / tokens


def bucket_edges(trained: int, target: int) -> tuple[int, ...]:
    """Quarter, half and whole of the trained length, then 1.5, 2, 3, 4, 6, 8 ... times it, up to
    the target."""
    edges = [0, trained // 4, trained // 2, trained]
    step = 1
    while edges[-1] < target:
        edges += [trained * step * 3 // 2, trained * step * 2]
        step *= 2
    return tuple(sorted({e for e in edges if e < target} | {target}))


@dataclass(frozen=True)
class Reader:
    """How a model's losses are read: next tokens, or masked ones.

    whole: never in pieces through the cache. limit: the model cannot read more tokens than these.
    """

    model: Any
    mask_token: int | None = None
    whole: bool = False
    limit: int | None = None

    def losses(self, tokens: Tensor) -> Tensor:
        """(batch, length), NaN where a token is not predicted."""
        if self.limit is not None and tokens.shape[1] > self.limit:
            beyond = tokens.shape[1] - self.limit
            return F.pad(self.losses(tokens[:, : self.limit]), (0, beyond), value=torch.nan)
        if self.mask_token is not None:
            return masked_token_losses(self.model, tokens, self.mask_token)
        losses = next_token_losses(self.model, tokens, whole=self.whole)
        return torch.cat([torch.full_like(losses[:, :1], torch.nan), losses], dim=1)


def evaluate(
    reader: Reader,
    windows: Windows,
    trained: int,
    *,
    contexts: tuple[int, ...] = (),
    targets: int = 64,
    passkey: PasskeyGrid | None = None,
    entropy: bool = True,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Evaluation:
    """Measure one variant of a checkpoint on packed windows of the target length.

    Args:
        reader: the model and how to read it.
        windows: tokens, each window as long as the target length.
        trained: the length the checkpoint was trained at, in tokens.
        contexts: lengths at which the loss of the same last `targets` tokens is measured, on the
            first half of the windows.
        passkey: the grid of lengths and depths; None to leave it out.
        entropy: measure the entropy of attention on the first window.
        progress: called with what is being measured and the share done.
    """
    began = time.perf_counter()
    length = windows.tokens.shape[1]
    edges = bucket_edges(trained, length)
    rows = max(1, 4096 // length)
    losses = []
    for start in range(0, len(windows), rows):
        losses.append(reader.losses(windows.tokens[start : start + rows]).numpy())
        progress("loss by position", min(1.0, (start + rows) / len(windows)))
    loss = np.concatenate(losses)
    documents = windows.documents.numpy()
    by_position = tuple(
        estimate(loss[:, low:high], documents[:, low:high])
        for low, high in itertools.pairwise(edges)
    )
    by_context = {}
    half = slice((len(windows) + 1) // 2)
    for i, context in enumerate(contexts):
        ends = [
            reader.losses(w[:, -context:])[:, -targets:]
            for w in windows.tokens[half].split(max(1, 4096 // context))
        ]
        by_context[context] = estimate(torch.cat(ends).numpy(), documents[half, -targets:])
        progress("loss by context", (i + 1) / len(contexts))
    grid = passkey.measure(reader, windows, progress) if passkey is not None else {}
    curve = attention_entropy(reader.model, windows.tokens[:1, : reader.limit]) if entropy else None
    means = () if curve is None else tuple(
        float(curve[low:high].mean()) for low, high in itertools.pairwise(edges)
    )  # fmt: skip
    return Evaluation(edges, by_position, by_context, grid, means, time.perf_counter() - began)


def estimate(losses: np.ndarray, documents: np.ndarray) -> Estimate:
    """Token-weighted mean of the losses that are numbers, and its interval from resampled
    documents."""
    kept = ~np.isnan(losses)
    owners, index = np.unique(documents[kept], return_inverse=True)
    sums = np.bincount(index, losses[kept], len(owners))
    counts = np.bincount(index, minlength=len(owners)).astype(float)
    if not len(owners):
        return Estimate(math.nan, math.nan, math.nan, 0)
    draws = np.random.default_rng(0).integers(0, len(owners), (BOOTSTRAPS, len(owners)))
    low, high = np.percentile(sums[draws].sum(1) / counts[draws].sum(1), [2.5, 97.5])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()))


@dataclass(frozen=True)
class PasskeyGrid:
    """Can the model repeat a random key it saw at some depth of a long text? Needs no particular
    language.

    marker + key stand at the depth; the text ends with the marker, and each token of the key is
    predicted given those before it. Chance is one in the vocabulary.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.95)
    trials: int = 8
    key_tokens: int = 6
    marker_tokens: int = 4

    def measure(
        self, reader: Reader, windows: Windows, progress: Callable[[str, float], None]
    ) -> dict[tuple[int, float], float]:
        filler = windows.tokens.flatten()
        words = torch.unique(filler)
        generator = torch.Generator().manual_seed(0)
        grid = {}
        for i, length in enumerate(self.lengths):
            for depth in self.depths:
                tokens = torch.stack(
                    [
                        self._prompt(filler, words, length, depth, generator)
                        for _ in range(self.trials)
                    ]
                )
                grid[length, depth] = float(self._accuracy(reader, tokens))
            progress("passkeys", (i + 1) / len(self.lengths))
        return grid

    def _prompt(
        self, filler: Tensor, words: Tensor, length: int, depth: float, generator: torch.Generator
    ) -> Tensor:
        secret = self.marker_tokens + self.key_tokens
        drawn = words[torch.randperm(len(words), generator=generator)[:secret]]
        body = length - 2 * secret
        start = int(torch.randint(0, len(filler) - body + 1, (1,), generator=generator))
        text = filler[start : start + body]
        at = round(depth * body)
        return torch.cat([text[:at], drawn, text[at:], drawn])

    @torch.inference_mode()
    def _accuracy(self, reader: Reader, tokens: Tensor) -> Tensor:
        rows = max(1, 4096 // tokens.shape[1])
        right = []
        for part in tokens.split(rows):
            logits = reader.model(part, use_cache=False).logits[:, -self.key_tokens - 1 : -1]
            right.append((logits.argmax(-1) == part[:, -self.key_tokens :]).float().mean(-1))
        return torch.cat(right).mean()
