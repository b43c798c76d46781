"""Compute the loss of every token in nats. Memory does not grow with vocabulary times length."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.hf.checkpoint.loading import text_config_of
from posenc.hf.chunked_logits import ChunkedLogits, chunk_slices
from posenc.hf.transformers_compat import arguments_for_next_step
from posenc.hf.tuning import MASKED_SHARE

MAX_LOGITS_AT_ONCE = 1 << 24
"""Logits in memory at once; a longer window is read in pieces through the model's cache."""
MAX_TOKENS_WIDENED_AT_ONCE = 512
"""Tokens whose logits are widened to float32 at once."""
MAX_TOKENS_PER_BATCH = 4096
"""Tokens read in one batch, or one window where it is longer."""


class NotFinite(ValueError):
    """Raised if a model returns a loss that is NaN or infinite, so that no result would mean
    anything."""


@dataclass(frozen=True)
class LossReader:
    """Compute the losses of a model, of next tokens or of masked ones.

    mask_token_id: id of the mask token of a masked model; None for a causal one.
    in_one_piece: True to never read in pieces through the cache.
    max_tokens: the most tokens that the model can read at once; None for any number.
    window_length: in texts of more tokens than this, each token is read with only the last ones
        before it: between three quarters of `window_length` and all of it. None to read with all
        before it.
    """

    model: Any
    mask_token_id: int | None = None
    in_one_piece: bool = False
    max_tokens: int | None = None
    window_length: int | None = None

    def losses(self, tokens: Tensor) -> Tensor:
        """Return losses (batch, length), NaN for tokens that are not predicted. Raises:
        NotFinite."""
        length = tokens.shape[1]
        if self.max_tokens is not None and length > self.max_tokens:
            first_losses = self._losses_at_once(tokens[:, : self.max_tokens])
            return F.pad(first_losses, (0, length - self.max_tokens), value=torch.nan)
        if self.window_length is not None and length > self.window_length:
            return self._sliding_losses(tokens, self.window_length)
        return self._losses_at_once(tokens)

    def losses_in_batches(self, windows: Tensor) -> Tensor:
        """Return the losses of many windows, (windows, length), as `losses` does, a few at a
        time."""
        windows_per_batch = max(1, MAX_TOKENS_PER_BATCH // windows.shape[1])
        return torch.cat([self.losses(part) for part in windows.split(windows_per_batch)])

    def _sliding_losses(self, tokens: Tensor, window_length: int) -> Tensor:
        """Return the losses of tokens of which each is read with at most `window_length` tokens.
        The window moves by a quarter of itself, and gives the losses of the tokens that are new in
        it."""
        step = max(1, window_length // 4)
        loss_pieces = [self._losses_at_once(tokens[:, :window_length])]
        for stop in range(window_length + step, tokens.shape[1] + step, step):
            window_tokens = tokens[:, min(stop, tokens.shape[1]) - window_length : stop]
            num_new = step - max(0, stop - tokens.shape[1])
            loss_pieces.append(self._losses_at_once(window_tokens)[:, -num_new:])
        return torch.cat(loss_pieces, dim=1)

    def _losses_at_once(self, tokens: Tensor) -> Tensor:
        """Return losses as `losses` does, regardless of `max_tokens` and `window_length`."""
        if self.mask_token_id is not None:
            return masked_token_losses(self.model, tokens, self.mask_token_id)
        losses = _require_finite(
            next_token_losses(self.model, tokens, in_one_piece=self.in_one_piece)
        )
        return torch.cat([torch.full_like(losses[:, :1], torch.nan), losses], dim=1)


@torch.inference_mode()
def next_token_losses(model: Any, tokens: Tensor, *, in_one_piece: bool = False) -> Tensor:
    """Return the losses (batch, length - 1) of tokens[:, 1:], each given all tokens before it, in
    nats.

    in_one_piece: True to read a window of any size in one forward, for methods whose cache is not
    exact.
    """
    tokens = tokens.to(model.device)
    batch, length = tokens.shape
    piece_len = piece_length(model, batch)
    if in_one_piece or length <= piece_len:
        return _losses_in_chunks(model, tokens, tokens, slice(1, None))
    cache_arguments: dict[str, Any] = {"use_cache": True}
    losses = []
    for start in range(0, length - 1, piece_len):
        out = model(tokens[:, start : start + piece_len], **cache_arguments)
        cache_arguments = arguments_for_next_step(model, out)
        targets = tokens[:, start + 1 : start + piece_len + 1]
        losses.append(_cross_entropies(out.logits[:, : targets.shape[1]], targets))
    return torch.cat(losses, dim=1)


def piece_length(model: Any, batch: int) -> int:
    """Return how many tokens of each of `batch` windows are read at once through the cache."""
    return max(128, MAX_LOGITS_AT_ONCE // (batch * text_config_of(model.config).vocab_size))


@torch.inference_mode()
def masked_token_losses(model: Any, tokens: Tensor, mask_token_id: int) -> Tensor:
    """Return the losses (batch, length) of a random MASKED_SHARE of the tokens, which are replaced
    by the mask token; NaN for the others."""
    draws = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0))
    is_masked = draws < MASKED_SHARE
    model_input = tokens.masked_fill(is_masked, mask_token_id).to(model.device)
    losses = _losses_in_chunks(model, model_input, tokens.to(model.device), slice(None))
    return _require_finite(losses).masked_fill(~is_masked, torch.nan)


def _losses_in_chunks(model: Any, tokens: Tensor, all_tokens: Tensor, predicted: slice) -> Tensor:
    """Return the losses of `all_tokens[:, predicted]`, (batch, predicted), read in one forward: the
    hidden states of all tokens, and the logits of a chunk of them at a time.

    tokens: what the model reads, (batch, length).
    """
    divided = ChunkedLogits(model)
    hidden = divided.hidden_states(tokens)
    targets = all_tokens[:, predicted].to(hidden.device)
    loss_pieces = [
        _cross_entropies(divided.logits(hidden[:, positions]), targets[:, positions])
        for positions in chunk_slices(hidden, divided.vocab_size, stop=targets.shape[1])
    ]
    return torch.cat(loss_pieces, dim=1) if loss_pieces else torch.zeros(targets.shape)


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target in float32, (batch, length), on the CPU. It works a few rows at
    a time, so that logits in half precision are never widened all at once."""
    loss_pieces = [
        F.cross_entropy(logit_piece.flatten(0, 1).float(), target_piece.flatten(), reduction="none")
        .view(target_piece.shape)
        .cpu()
        for logit_piece, target_piece in zip(
            logits.split(MAX_TOKENS_WIDENED_AT_ONCE, 1),
            targets.split(MAX_TOKENS_WIDENED_AT_ONCE, 1),
            strict=True,
        )
    ]
    return torch.cat(loss_pieces, dim=1) if loss_pieces else torch.zeros(targets.shape)


def _require_finite(losses: Tensor) -> Tensor:
    """Return the losses unchanged. Raises: NotFinite if one is NaN or infinite."""
    num_nonfinite = int((~losses.isfinite()).sum())
    if num_nonfinite:
        raise NotFinite(f"{num_nonfinite} of {losses.numel()} losses are NaN or infinite")
    return losses


@torch.inference_mode()
def last_logits(model: Any, tokens: Tensor, count: int) -> Tensor:
    """Return the logits of the last `count` tokens, (batch, count, vocab); of a model without a
    head their states, (batch, count, width). Models that can skip the other logits do."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = count
    outputs = model(tokens.to(model.device), use_cache=False, **options)
    return logits_or_states(outputs)[:, -count:].cpu()


def logits_or_states(outputs: Any) -> Tensor:
    """Return the logits that a model of transformers has put out, (batch, length, vocab); without a
    head its states, (batch, length, width)."""
    logits = getattr(outputs, "logits", None)
    return outputs.last_hidden_state if logits is None else logits
