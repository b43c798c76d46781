"""Continue a prompt: greedily, by sampling, or by beam search."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from posenc import masks
from posenc.arguments import check_count, check_number, explain_misfits
from posenc.models.decoder import Decoder
from posenc.models.encoder_decoder import ConditionedDecoder

LanguageModel = Decoder | ConditionedDecoder
"""A model that computes the logits of next tokens: a Decoder, or the result of
EncoderDecoder.conditioned_on."""


@explain_misfits
@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Int[Tensor, "batch len"],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    stop_token: int | None = None,
    valid: Shaped[Tensor, "batch len"] | None = None,
    length: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "batch total"]:
    """Generate tokens with a key/value cache. Return the prompts, each followed by its new tokens:
    (batch, len + new), where `new` is max_new_tokens, or less if all rows end before.

    Args:
        model: a Decoder, or EncoderDecoder.conditioned_on(...); it runs in eval mode.
        tokens: the prompts (batch, len), padded on the left if their lengths differ.
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of logits before sampling; 0 selects the likeliest token.
        top_k: sample among the k likeliest tokens only.
        top_p: sample among the likeliest tokens with this total probability only.
        num_beams: above 1, search for the likeliest sequence with this many candidates.
        length_penalty: candidates are compared by log-probability / new tokens^length_penalty.
        stop_token: token that ends a row and then fills it; None for none. Beam search treats
            finished candidates as transformers does with early_stopping=False.
        valid: (batch, len), False for padding.
        length: the final length in tokens, for encodings whose frequencies depend on it, because
            cached keys are wrong if it changes.
        generator: random numbers for sampling; None uses torch's.

    Raises: ValueError if options contradict each other or shapes do not fit.

    >>> config = posenc.DecoderConfig(vocab_size=256, embed_dim=64, num_layers=2, num_heads=4)
    >>> model = posenc.Decoder(config, posenc.ALiBi(num_heads=4)).eval()
    >>> posenc.generate(model, torch.tensor([[5, 7, 9]]), max_new_tokens=4).shape
    torch.Size([1, 7])
    """
    _check_arguments(
        tokens, max_new_tokens, temperature, top_k, top_p, num_beams, length_penalty, valid, length
    )
    with eval_mode(model):
        state = _GenerationState(model, tokens, valid, length)
        vocab_size = state.logits.shape[-1]
        if stop_token is not None:
            check_count("generate", "stop_token", stop_token, 0, vocab_size - 1)
        if num_beams > 1:
            return _beam_search(state, max_new_tokens, num_beams, length_penalty, stop_token)
        return _sample_tokens(
            state, max_new_tokens, float(temperature), top_k, top_p, stop_token, generator
        )


@contextmanager
def eval_mode(model: LanguageModel | nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block. After it each module has its own earlier mode
    again: a part of the model may have been in another one."""
    whole_module = model if isinstance(model, nn.Module) else model.model
    was_training = {module: module.training for module in whole_module.modules()}
    try:
        whole_module.eval()
        yield
    finally:
        for module, mode_before in was_training.items():
            module.training = mode_before


def _sample_tokens(
    state: "_GenerationState",
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_token: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the prompts with up to max_new_tokens tokens appended, each sampled, or the likeliest
    one if the temperature is 0. A row that has its stop_token is filled with it."""
    tokens = state.tokens
    is_done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        if temperature == 0:
            chosen_tokens = state.logits.argmax(-1)
        else:
            # At most 0, so that a division by a low temperature does not overflow.
            shifted_logits = state.logits - state.logits.amax(-1, keepdim=True)
            probabilities = _hide_unlikely_tokens(
                shifted_logits / temperature, top_k, top_p
            ).softmax(-1)
            chosen_tokens = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        if stop_token is not None:
            chosen_tokens = chosen_tokens.masked_fill(is_done, stop_token)
            is_done = is_done | (chosen_tokens == stop_token)
        tokens = torch.cat([tokens, chosen_tokens[:, None]], dim=1)
        if stop_token is not None and is_done.all():
            break
        state.append(chosen_tokens)
    return tokens


class _GenerationState:
    """Hold the state of generation: caches, padding, and logits of the next token (batch, vocab).

    tokens: the prompts (batch, len), which the constructor reads.
    valid: (batch, tokens so far), False for padding; None if there is none.
    length: the final length for encodings whose frequencies depend on it, or None.
    """

    def __init__(
        self, model: LanguageModel, tokens: Tensor, valid: Tensor | None, length: int | None
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.length = length
        self.caches = model.new_caches()
        self.valid = None if valid is None else valid.bool()
        positions = None
        if self.valid is not None:  # padding is not counted; it gets 0, and the mask hides it
            positions = (self.valid.cumsum(1) - 1).clamp(min=0)
        self._feed(tokens, positions)

    def append(self, chosen: Tensor) -> None:
        """Append one token to each row, `chosen` (batch,), and compute the logits after it."""
        positions = None
        if self.valid is not None:
            positions = self.valid.sum(1, keepdim=True)  # counted from 0: that of the next token
            self.valid = torch.cat([self.valid, torch.ones_like(self.valid[:, :1])], dim=1)
        self._feed(chosen[:, None], positions)

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch only, in this order; a row may occur several times."""
        for cache in self.caches:
            cache.reorder(rows)
        self.logits = self.logits[rows]
        self.valid = None if self.valid is None else self.valid[rows]

    def _feed(self, tokens: Tensor, positions: Tensor | None) -> None:
        """Run the model on tokens (batch, new), which are appended to the caches, and store the
        logits after the last one."""
        num_axes = self.model.encoding.claims.num_axes
        if positions is not None and num_axes > 1:  # text has the same place on every axis
            positions = positions[..., None].expand(-1, -1, num_axes)
        mask = None if self.valid is None else masks.causal & masks.padding(self.valid)
        logits = self.model(tokens, positions, caches=self.caches, mask=mask, length=self.length)
        self.logits = logits[:, -1].float()  # sampling and sums of log-probabilities in float32


def _beam_search(
    state: _GenerationState,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float,
    stop_token: int | None,
) -> Tensor:
    """Return the prompts, each followed by its best continuation, by the rules of transformers with
    early_stopping=False.

    In each step the num_beams likeliest unfinished continuations of each row are extended. They are
    `tokens`, with log-probabilities `scores`; finished ones are `ended_tokens`, with
    length-penalised log-probabilities `ended_scores`. Both have num_beams for each row. A row is
    finished as soon as its best unfinished continuation scores no more than its worst finished one.

    stop_token: token that ends a continuation; None for none, so that all have max_new_tokens.
    """
    batch = state.tokens.shape[0]
    device = state.tokens.device
    # (batch, 1), to index beams of each row
    row_index = torch.arange(batch, device=device)[:, None]
    state.reorder(row_index.expand(-1, num_beams).flatten())
    stop_token = -1 if stop_token is None else stop_token  # no token is -1
    tokens = state.tokens[:, None].expand(-1, num_beams, -1)
    ended_tokens = tokens
    # All beams of a row start equal, so only the first is extended in the first step.
    scores = torch.full((batch, num_beams), -torch.inf, device=device)
    ended_scores = scores.clone()
    scores[:, 0] = 0
    is_searched = torch.ones(batch, 1, dtype=torch.bool, device=device)
    for step in range(1, max_new_tokens + 1):
        log_probabilities = state.logits.log_softmax(-1).view(batch, num_beams, -1)
        vocab_size = log_probabilities.shape[-1]
        # Twice as many as are kept: each beam may end with its likeliest token.
        totals = (scores[..., None] + log_probabilities).flatten(1)
        totals, flat_index = totals.topk(min(2 * num_beams, totals.shape[1]))
        beam_index = flat_index // vocab_size
        chosen_tokens = flat_index % vocab_size
        extended_tokens = torch.cat(
            [tokens[row_index, beam_index], chosen_tokens[..., None]], dim=-1
        )
        is_end = (chosen_tokens == stop_token) | (step == max_new_tokens)

        # Finished: one counts only if it is among the num_beams likeliest of a row in search.
        is_counted = is_end & is_searched
        is_counted[:, num_beams:] = False
        finished_scores = (totals / step**length_penalty).masked_fill(~is_counted, -torch.inf)
        ended_scores, kept_index = torch.cat([ended_scores, finished_scores], dim=1).topk(num_beams)
        padded_tokens = nn.functional.pad(ended_tokens, (0, 1), value=stop_token)
        ended_tokens = torch.cat([padded_tokens, extended_tokens], 1)[row_index, kept_index]

        # Unfinished: the likeliest that do not end.
        scores, kept_index = totals.masked_fill(is_end, -torch.inf).topk(num_beams)
        tokens = extended_tokens[row_index, kept_index]
        is_searched = is_searched & (scores[:, :1] / step**length_penalty > ended_scores[:, -1:])
        if not is_searched.any():
            break
        # The caches have a row for each beam: those of the beams that were extended go on.
        state.reorder((beam_index.gather(1, kept_index) + row_index * num_beams).flatten())
        state.append(tokens[..., -1].flatten())
    return ended_tokens[:, 0]  # topk sorts: the best is first


def _hide_unlikely_tokens(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the logits (batch, vocab) with -inf for tokens that are not among the top_k likeliest,
    or not among the likeliest with total probability top_p; None sets no limit."""
    if top_k is not None:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p is not None:
        sorted_logits, token_order = logits.sort(descending=True)
        probabilities = sorted_logits.softmax(-1)
        # A token stays if the likelier ones together are below top_p; the first always stays.
        is_hidden = probabilities.cumsum(-1) - probabilities >= top_p
        # From the order of probabilities back to that of tokens.
        logits = logits.masked_fill(is_hidden.scatter(1, token_order, is_hidden), -torch.inf)
    return logits


def _check_arguments(
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    num_beams: int,
    length_penalty: float,
    valid: Tensor | None,
    length: int | None,
) -> None:
    """Raise TypeError or ValueError for arguments of `generate` that do not fit."""
    _check_prompts(tokens, valid)
    check_count("generate", "max_new_tokens", max_new_tokens)
    check_count("generate", "num_beams", num_beams)
    check_number("generate", "length_penalty", length_penalty)
    check_number("generate", "temperature", temperature)
    if temperature < 0:
        raise ValueError(f"generate: temperature must not be negative, got {temperature}.")
    if top_k is not None:
        check_count("generate", "top_k", top_k)
    if top_p is not None:
        check_number("generate", "top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, got {top_p}.")
    if length is not None:
        check_count("generate", "length", length)
    if num_beams > 1 and temperature:
        raise ValueError("generate: beam search does not sample; leave temperature at 0.")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("generate: top_k and top_p need a temperature above 0.")


def _check_prompts(tokens: Tensor, valid: Tensor | None) -> None:
    """Raise TypeError unless both are tensors. Raise ValueError unless the prompts have a token,
    `valid` has their shape, and padding is on the left: each row of `valid` ends with True."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"generate: tokens must be a tensor, got {type(tokens).__name__}.")
    if valid is not None and not isinstance(valid, Tensor):
        raise TypeError(f"generate: valid must be a tensor, got {type(valid).__name__}.")
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ValueError(
            f"generate: tokens must be (batch, len) with at least one token, "
            f"got {tuple(tokens.shape)}."
        )
    if valid is not None and (valid.shape != tokens.shape or not bool(valid[:, -1].all())):
        raise ValueError(
            f"generate: valid must have the shape of tokens {tuple(tokens.shape)} and end with "
            f"True in every row (padding goes on the left), got shape {tuple(valid.shape)}."
        )
