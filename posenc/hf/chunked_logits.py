"""Compute logits for a few tokens at a time, with gradients.

The logits of a whole text, length x vocabulary, are then never in memory.

A model of transformers is a backbone, which returns hidden states, and a head, which turns each of
them into logits: usually one linear layer, in some families more (a cap, a scale, a norm).

    tokens -> backbone -> hidden states -> head -> logits
              once, whole text             a chunk at a time

No family's head is written down here: the model itself is called on a chunk, with its backbone
replaced by one that returns the hidden states of the chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posenc.hf.transformers_compat import forward_takes
from posenc.models.generating import eval_mode

MAX_LOGITS_PER_CHUNK = 1 << 25
"""Logits of a chunk: 128 MiB in float32, and 256 tokens of a vocabulary of 128k. Chosen: the copies
that a loss and its gradient take stay below 1 GB, and multiplying by the head is still fast."""
NUM_COMPARED_TOKENS = 8
"""Tokens on which a model's logits in two chunks are compared with those at once."""

_BACKBONE_PATHS: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""The path of each model's backbone that was looked for; None for a model that is not divided."""


class ChunkedLogits:
    """Divide a causal or masked language model into backbone and head.

    A model whose parts cannot be divided, or that computes other logits in chunks, is taken whole:
    its "hidden states" are its logits. Every call is then right, and memory grows with length x
    vocabulary.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **small)).eval()
    >>> divided = ChunkedLogits(model)
    >>> tokens = torch.arange(10)[None]
    >>> logits = divided.logits(divided.hidden_states(tokens)[:, 4:])
    >>> torch.allclose(logits, model(tokens).logits[:, 4:], atol=1e-6)
    True
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        if model not in _BACKBONE_PATHS:
            _BACKBONE_PATHS[model] = _find_backbone(model)
        path = _BACKBONE_PATHS[model]
        self.backbone: Any = None if path is None else model.get_submodule(path)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states of tokens (batch, length), (batch, length, channels)."""
        tokens = tokens.to(self.model.device)
        if self.backbone is None:
            return call_without_cache(self.model, tokens).logits
        return call_without_cache(self.backbone, tokens).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states (batch, length, channels), (batch, length,
        vocabulary)."""
        if self.backbone is None:
            return hidden
        # The head reads no tokens: these are only there to be counted.
        placeholders = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        with _returns_hidden_states(self.backbone, hidden):
            return call_without_cache(self.model, placeholders).logits

    def sum_over_chunks(
        self,
        hidden: Tensor,
        loss_of_chunk: Callable[[Tensor, slice], Tensor],
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return the sum of a loss over hidden states (batch, length, channels), chunk by chunk. In
        the backward pass each chunk's logits are computed again, so that one chunk is in memory.

        loss_of_chunk: takes the logits of a chunk in float32, (batch, chunk, vocabulary), and the
        slice of positions that they belong to; returns a scalar. start, stop: the positions that
        are summed over.
        """
        losses = []
        for positions in chunk_slices(hidden, self.vocab_size, start, stop):

            def loss_of_hidden(hidden_chunk: Tensor, positions: slice = positions) -> Tensor:
                return loss_of_chunk(self.logits(hidden_chunk).float(), positions)

            chunk = hidden[:, positions]
            if torch.is_grad_enabled():
                losses.append(checkpoint(loss_of_hidden, chunk, use_reentrant=False))
            else:
                losses.append(loss_of_hidden(chunk))
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary of the model's config; 1 for a model without one, whose
        chunks are then whole texts."""
        config = getattr(self.model, "config", None)
        text_config = getattr(config, "text_config", None) or config
        return getattr(text_config, "vocab_size", 1)


def chunk_slices(
    hidden: Tensor, vocab_size: int, start: int = 0, stop: int | None = None
) -> list[slice]:
    """Return slices of the positions from `start` to `stop`, each of so many that a batch of their
    logits has at most MAX_LOGITS_PER_CHUNK elements. hidden: (batch, length, channels)."""
    batch, length, _ = hidden.shape
    stop = length if stop is None else stop
    chunk_len = max(1, MAX_LOGITS_PER_CHUNK // (batch * vocab_size))
    return [slice(i, min(i + chunk_len, stop)) for i in range(start, stop, chunk_len)]


def call_without_cache(module: Any, tokens: Tensor) -> Any:
    """Return the output of a model of transformers for tokens (batch, length), without making a
    cache."""
    options = {"use_cache": False} if forward_takes(module, "use_cache") else {}
    return module(tokens, **options)


class _HiddenStatesOnly:
    """Stand for the output of a backbone: the last hidden states, and None for anything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, key: int | slice) -> Any:
        return (self.last_hidden_state,)[key]


@contextmanager
def _returns_hidden_states(backbone: Any, hidden: Tensor) -> Iterator[None]:
    """Let a call of the backbone return `hidden`, and compute nothing, inside the block."""
    output = _HiddenStatesOnly(hidden)
    forward_before = vars(backbone).get("forward")  # a library may have set one
    backbone.forward = lambda *args, **options: output
    try:
        yield
    finally:
        del backbone.forward
        if forward_before is not None:
            backbone.forward = forward_before


@torch.no_grad()
def _find_backbone(model: Any) -> str | None:
    """Return the path of the first model inside of the model that its forward calls, if the rest of
    the forward turns every hidden state into logits by itself; else None.

    The model is called in evaluation mode: dropout would draw random numbers, and the two ways
    would differ.
    """
    try:
        with eval_mode(model):
            path = _path_of_first_model_called(model)
            if path is None:
                return None
            _BACKBONE_PATHS[model] = path
            return path if _logits_in_chunks_are_equal(model) else None
    except Exception:  # a family's code may raise anything when its backbone is replaced
        return None
    finally:
        _BACKBONE_PATHS.pop(model, None)


def _path_of_first_model_called(model: Any) -> str | None:
    """Return the path of the PreTrainedModel inside of the model that is called first, which is the
    outermost one; None without."""
    from transformers import PreTrainedModel

    called_paths: list[str] = []
    hooks = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module is not model:

            def note_path(_module: nn.Module, _arguments: Any, path: str = path) -> None:
                called_paths.append(path)

            hooks.append(module.register_forward_pre_hook(note_path))
    if not hooks:
        return None
    try:
        call_without_cache(model, _compared_tokens(model))
    finally:
        for hook in hooks:
            hook.remove()
    return called_paths[0] if called_paths else None


def _logits_in_chunks_are_equal(model: Any) -> bool:
    """Return True if logits of a few tokens in two chunks are those of one call."""
    tokens = _compared_tokens(model)
    expected = call_without_cache(model, tokens).logits.float()
    divided = ChunkedLogits(model)
    hidden = divided.hidden_states(tokens)
    halves = hidden.split(NUM_COMPARED_TOKENS // 2, dim=1)
    logits = torch.cat([divided.logits(half) for half in halves], dim=1).float()
    if logits.is_meta:  # without values
        return logits.shape == expected.shape
    # Other shapes of matrices may round the last bits otherwise.
    tolerance = 16 * torch.finfo(hidden.dtype).eps * float(expected.abs().max())
    return logits.shape == expected.shape and bool((logits - expected).abs().max() <= tolerance)


def _compared_tokens(model: Any) -> Tensor:
    """Return a few tokens that every vocabulary has, (1, NUM_COMPARED_TOKENS)."""
    return torch.arange(NUM_COMPARED_TOKENS, device=model.device)[None]
