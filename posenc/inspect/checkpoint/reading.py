"""Split a sentence into tokens, and run it through a model: attention, hidden states, logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.hf.checkpoint.tokenization import load_tokenizer, parse_token_ids, tokenization_kind
from posenc.inspect.checkpoint.positions import DISENTANGLED_METHODS

Span = tuple[int, int]
"""First and last + 1 of a run of characters or tokens; equal for a token without text."""


@dataclass(frozen=True)
class Sentence:
    """Token ids, and the characters that each of them covers.

    spans: first character and end of each token in `text`; (i, i) for a special token. groups:
    first token and end of each run of tokens that share a character, as three tokens share a
    Chinese one of three bytes; mostly one token each. labels: the text of each group.

    "a中" as bytes: ids (97, 228, 184, 173), spans ((0, 1), (1, 2), (1, 2), (1, 2)), groups ((0, 1),
    (1, 4)), labels ("a", "中").
    """

    text: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    groups: tuple[Span, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens_of(self, word: str) -> Span:
        """Return first and last + 1 of the tokens that contain the first occurrence of `word`.

        Raises: ValueError where the text has no such word, no token covers it, or a token holds
        more than the word.
        """
        start = self.text.find(word) if word else -1
        if start < 0:
            raise ValueError(f"--swap: {word!r} is not in the text {self.text!r}.")
        stop = start + len(word)
        indices = [
            i
            for i, (a, b) in enumerate(self.spans)
            # A special token, such as one between two words, covers no character: (i, i).
            if a < b and a < stop and b > start
        ]
        if not indices:
            raise ValueError(
                f"--swap: no token covers {word!r} in the text; give a word that the tokenizer "
                "keeps."
            )
        first_character = self.spans[indices[0]][0]
        end_character = self.spans[indices[-1]][1]
        outside_text = self.text[first_character:start] + self.text[stop:end_character]
        if outside_text.strip():
            raise ValueError(
                f"--swap: the tokens of {word!r} hold {outside_text.strip()!r} as well; give whole "
                "words."
            )
        return indices[0], indices[-1] + 1


def tokenize_sentence(
    folder: Path, vocab_size: int, text: str, *, as_bytes: bool = False, as_ids: bool = False
) -> Sentence:
    """Split the text into tokens, with the special tokens that the tokenizer adds.

    as_bytes, as_ids: read the text without a tokenizer, as bytes or as token ids between spaces.

    Raises: ValueError for an empty text, or where there is no tokenizer, see `tokenization_kind`.
    """
    if not text.strip():
        raise ValueError("--sentence is empty: give a sentence.")
    tokenization = tokenization_kind(folder, vocab_size, as_bytes=as_bytes, as_ids=as_ids)
    if tokenization == "ids":
        ids = parse_token_ids(text, vocab_size)
        return _labelled_sentence(text, ids, _word_spans(text), {})
    if tokenization == "bytes":
        start_ids = [256] if vocab_size > 256 else []  # the id after those of all bytes
        ids = start_ids + list(text.encode("utf-8"))
        spans = [(0, 0)] * len(start_ids) + [
            (i, i + 1) for i, character in enumerate(text) for _ in character.encode("utf-8")
        ]
        return _labelled_sentence(text, ids, spans, dict.fromkeys(start_ids, "[start]"))
    tokenizer = load_tokenizer(folder)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder}: its tokenizer does not say which characters a token covers; "
            "save it as tokenizer.json."
        )
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    names_by_id = dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
    return _labelled_sentence(text, ids, [tuple(s) for s in encoded["offset_mapping"]], names_by_id)


def _word_spans(text: str) -> list[Span]:
    """Return (first character, last + 1) of each word between spaces: "a bc" -> [(0, 1), (2,
    4)]."""
    spans = []
    search_from = 0
    for word in text.split():
        start = text.index(word, search_from)
        search_from = start + len(word)
        spans.append((start, search_from))
    return spans


def _labelled_sentence(
    text: str, ids: Sequence[int], spans: Sequence[Span], names_by_id: dict[int, str]
) -> Sentence:
    """Return the Sentence of these tokens: tokens that share a character, as the bytes of a Chinese
    one do, form a group, which is labelled by its text.

    spans: the characters of each token. names_by_id: a label for each id of a token without text;
    "·" labels one that is missing here.
    """
    group_starts = [0]
    for index, (before, here) in enumerate(pairwise(spans), 1):
        shares_character = here[0] < before[1] and here[0] < here[1]
        if not shares_character:
            group_starts.append(index)
    groups = tuple(pairwise([*group_starts, len(ids)]))
    labels = []
    for first, last in groups:
        covered_text = text[
            min(a for a, _ in spans[first:last]) : max(b for _, b in spans[first:last])
        ]
        labels.append(covered_text.strip() or names_by_id.get(ids[first], covered_text) or "·")
    return Sentence(text, tuple(ids), tuple(spans), groups, tuple(labels))


@dataclass(frozen=True)
class Reading:
    """What a model computes for one text.

    attention: (layers, heads, length, length) by stack, "" if there is one. hidden_states: (layers
    + 1, length, width) of the stack that reads the text, embeddings first. The last is the last
    layer's output before the final norm. logits: (length, vocabulary); with two stacks, of the
    decoder's first token; None for a model without a head.
    """

    attention: dict[str, Tensor]
    hidden_states: Tensor
    logits: Tensor | None

    @property
    def causal(self) -> bool:
        """Return True if no token of the text attends to a later one, as measured."""
        weights = next(iter(self.attention.values()))
        return not weights.triu(1).any()

    def distances(self) -> dict[str, Tensor]:
        """Return the mean distance of attention in tokens, (layers, heads), by stack."""
        return {name: mean_distance(weights) for name, weights in self.attention.items()}


def mean_distance(weights: Tensor) -> Tensor:
    """Return sum_j weight[i, j] |i - j|, averaged over queries i; weights (..., length, length)."""
    positions = torch.arange(weights.shape[-1], dtype=weights.dtype)
    return (weights * (positions[:, None] - positions).abs()).sum(-1).mean(-1)


@torch.inference_mode()
def read_sentence(model: Any, ids: Sequence[int]) -> Reading:
    """Run the model on the token ids of one sentence, and return its attention, states and logits.

    Raises: ValueError if it does not run, or returns no attention weights.
    """
    model_type = model.config.model_type
    inputs = _model_arguments(model, ids)
    with recorded_last_layers(model) as last_outputs:
        try:
            outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
        except Exception as error:  # some configs build a model whose own parts do not fit
            raise ValueError(
                f"A {model_type} model of this config does not run: its own code raises "
                f"{one_line(error)}"
            ) from error
    logits = getattr(outputs, "logits", None)  # a model without a head has none
    if logits is not None:
        logits = logits[0]
    has_two_stacks = model.config.is_encoder_decoder
    if has_two_stacks:
        attention = {"encoder": outputs.encoder_attentions, "decoder": outputs.decoder_attentions}
        hidden_states = outputs.encoder_hidden_states
        logits = None if logits is None else logits[:1]
    else:
        attention = {"": outputs.attentions}
        hidden_states = outputs.hidden_states
    if any(not layer_weights or layer_weights[0] is None for layer_weights in attention.values()):
        raise ValueError(f"A {model_type} model shows no attention weights.")
    if not has_two_stacks and _shapes_differ(outputs.attentions):
        raise ValueError(f"The layers of a {model_type} model look at different numbers of keys.")
    _check_states(model_type, hidden_states, logits)
    states = [*hidden_states[:-1], _last_states_before_norm(hidden_states, last_outputs)]
    return Reading(
        {stack: _without_batch(layer_weights) for stack, layer_weights in attention.items()},
        _without_batch(states),
        logits,
    )


def _check_states(model_type: str, hidden_states: Sequence[Tensor], logits: Tensor | None) -> None:
    """Raise ValueError if layers return states of different shapes, or if a state or a logit is not
    finite."""
    if _shapes_differ(hidden_states):
        raise ValueError(f"The layers of a {model_type} model hand on states of different shapes.")
    checked_tensors = hidden_states if logits is None else (*hidden_states, logits)
    if not all(tensor.isfinite().all() for tensor in checked_tensors):
        raise ValueError(
            "The model's states are NaN or infinite on this sentence: its weights overflow, so "
            "nothing can be measured."
        )


def _model_arguments(model: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the arguments of the model's forward: the text as a batch of one. With an encoder and
    a decoder both get the text, the decoder after its start token."""
    tokens = torch.tensor([ids])
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens}
    start_id = getattr(model.config, "decoder_start_token_id", None)
    if start_id is None:
        raise ValueError(
            "config.json has no decoder_start_token_id, the token with which its decoder begins: "
            "write it."
        )
    start_token = tokens.new_full((1, 1), start_id)
    return {
        "input_ids": tokens,
        "decoder_input_ids": torch.cat([start_token, tokens[:, :-1]], dim=-1),
    }


def _shapes_differ(tensors: Sequence[Tensor]) -> bool:
    """Return True if not all tensors have the same shape."""
    return len({tensor.shape for tensor in tensors}) > 1


def _without_batch(layer_tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors of all layers, each (1, ...), as one tensor (layers, ...)."""
    return torch.stack([tensor[0] for tensor in layer_tensors])


@contextmanager
def recorded_last_layers(model: Any) -> Iterator[list[tuple[int, Tensor]]]:
    """Record the output of the last module of each nn.ModuleList while the model runs inside the
    `with`.

    Yields: a list that is filled with (length of the ModuleList, output), in the order of running.
    """
    counts_and_states: list[tuple[int, Tensor]] = []

    def record_output(count: int, module: nn.Module, inputs: Any, returned: Any) -> None:
        state = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(state, Tensor):
            counts_and_states.append((count, state))

    module_lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    handles = [
        module_list[-1].register_forward_hook(partial(record_output, len(module_list)))
        for module_list in module_lists
    ]
    try:
        yield counts_and_states
    finally:
        for handle in handles:
            handle.remove()


def _last_states_before_norm(
    hidden_states: Sequence[Tensor], last_outputs: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """Return the last layer's states before the final norm, which transformers returns only after
    it; those after the norm if no recorded output fits.

    hidden_states: states as transformers returns them. last_outputs: what `recorded_last_layers`
    yields.
    """
    # The first that fits: the stack that reads the text runs first.
    num_layers = len(hidden_states) - 1
    shape = hidden_states[-1].shape
    fitting_states = (
        state
        for list_length, state in last_outputs
        if list_length == num_layers and state.shape == shape
    )
    return next(fitting_states, hidden_states[-1])


def attention_by_group(weights: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """Return attention between groups of tokens, (..., groups, groups): the sum over the keys of a
    group, the mean over its queries, so that rows still sum to 1.

    weights: (..., length, length). groups: first and last + 1 of each.
    """
    summed_over_keys = torch.stack([weights[..., a:b].sum(-1) for a, b in groups], dim=-1)
    return torch.stack([summed_over_keys[..., a:b, :].mean(-2) for a, b in groups], dim=-2)


@contextmanager
def recorded_relative_scores(model: Any) -> Iterator[list[Tensor]]:
    """Record the terms that DeBERTa's first layer adds to its scores while the model runs inside
    the `with`.

    Yields: a list that is filled with them, (heads, length, length).
    """
    terms: list[Tensor] = []
    owner: nn.Module | None = None
    method_name = ""
    for module, candidate in product(model.modules(), DISENTANGLED_METHODS):
        if hasattr(module, candidate):
            owner = module
            method_name = candidate
            break
    if owner is None:
        yield terms
        return
    method = getattr(owner, method_name)

    def record_terms(*args: Any, **kwargs: Any) -> Tensor:
        term = method(*args, **kwargs)
        terms.append(term.reshape(-1, *term.shape[-2:]))
        return term

    setattr(owner, method_name, record_terms)
    try:
        yield terms
    finally:
        delattr(owner, method_name)
