"""Measure everything about one checkpoint, as requested."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posenc.hf.checkpoint.loading import Checkpoint, load_checkpoint
from posenc.hf.checkpoint.text import tokenization_kind
from posenc.inspect.checkpoint import positions, structure
from posenc.inspect.checkpoint import reading as readings
from posenc.inspect.checkpoint.positions import Disentangled, Kind
from posenc.inspect.checkpoint.reading import Reading
from posenc.inspect.checkpoint.sentence import Sentence, tokenize_sentence
from posenc.inspect.checkpoint.structure import Structure
from posenc.inspect.checkpoint.swap import Swap, swap_words

DEFAULT_TEXT = "The company bought its rival."
DEFAULT_WORDS = ("company", "rival")
DEFAULT_REASON = "No --sentence was given: in this sentence only positions tell who buys whom."
DEFAULT_IDS = 16
MOST_TOKENS = 512
"""Most tokens. The attention of all heads is kept, so a text is a sentence or a paragraph."""


@dataclass(frozen=True)
class Request:
    """Arguments of the command line."""

    folder: Path
    text: str | None = None
    words: tuple[str, str] | None = None
    layers: Sequence[int] = ()
    as_bytes: bool = False
    as_ids: bool = False


@dataclass(frozen=True)
class Sheet:
    """Findings about positions in a checkpoint. longest: tokens that its config allows, None
    without a limit. masked: it predicts masked tokens instead of the next one."""

    folder: Path
    structure: Structure
    longest: int | None
    masked: bool
    positions: list[Kind]
    sentence: Sentence
    reason: str
    reading: Reading
    swap: Swap | None

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts; attention as its mean distances."""
        spent = {name or "all": d.tolist() for name, d in self.reading.distances().items()}
        return {
            "folder": str(self.folder),
            "structure": dataclasses.asdict(self.structure)
            | {"parameters": self.structure.parameters},
            "longest": self.longest,
            "causal": self.reading.causal,
            "positions": [
                {"kind": type(kind).__name__.lower(), **dataclasses.asdict(kind)}
                for kind in self.positions
            ],
            "text": self.sentence.text,
            "tokens": list(self.sentence.labels),
            "token_ids": list(self.sentence.ids),
            "attention_distance": spent,
            "swap": self.swap and {**dataclasses.asdict(self.swap), "verdicts": self.swap.verdicts},
        }


def measure_checkpoint(request: Request, tell: Callable[[str], None] = lambda step: None) -> Sheet:
    """Load the folder, read the sentence, exchange the words.

    Raises: ValueError for a folder that cannot be loaded, or a text that does not fit it.
    """
    tell(f"loading {request.folder}")
    # eager: the one that shows its weights
    checkpoint = load_checkpoint(request.folder, encoder_decoder=True, attention="eager")
    model = checkpoint.model
    text, words, reason = _text_and_words(request, checkpoint)
    vocabulary = checkpoint.config.vocab_size
    sentence = tokenize_sentence(
        request.folder, vocabulary, text, as_bytes=request.as_bytes, as_ids=request.as_ids
    )
    longest = checkpoint.max_positions
    _check_length(sentence, longest, request.folder)
    if words:
        _ = [sentence.tokens_of(word) for word in words]  # before the model runs
    built = structure.measure_structure(model)
    if wrong := [layer for layer in request.layers if not 0 <= layer < built.layers]:
        raise ValueError(
            f"--layer: layers are 0 .. {built.layers - 1}, got {', '.join(map(str, wrong))}."
        )
    tell("reading the text")
    kinds = positions.find_positions(checkpoint)
    with readings.recorded_relative_scores(model) as heard:
        result = readings.read_sentence(model, sentence.ids)
    kinds = [k.with_means(heard[0]) if isinstance(k, Disentangled) and heard else k for k in kinds]
    exchanged = None
    if words:
        tell("exchanging two words")
        with torch.inference_mode():
            exchanged = swap_words(model, sentence, words, checkpoint.masked)
    masked = checkpoint.masked
    return Sheet(request.folder, built, longest, masked, kinds, sentence, reason, result, exchanged)


def _text_and_words(
    request: Request, checkpoint: Checkpoint
) -> tuple[str, tuple[str, str] | None, str]:
    """Return the text, the words to exchange, and why a default was taken ("" where none was)."""
    if request.text is not None:
        return request.text, request.words, ""
    vocabulary = checkpoint.config.vocab_size
    kind = tokenization_kind(
        request.folder, vocabulary, as_bytes=request.as_bytes, as_ids=request.as_ids
    )
    if kind == "ids":
        count = min(DEFAULT_IDS, vocabulary)
        ids = [str(i * vocabulary // count) for i in range(count)]
        words = request.words or (ids[count // 3], ids[2 * count // 3])
        why = "No --sentence was given: token ids spread over the vocabulary."
        return " ".join(ids), words, why
    return DEFAULT_TEXT, request.words or DEFAULT_WORDS, DEFAULT_REASON


def _check_length(sentence: Sentence, longest: int | None, folder: Path) -> None:
    """Raise ValueError for a sentence that the model cannot read or nobody can see drawn."""
    count = len(sentence)
    if longest is not None and count > longest:
        raise ValueError(
            f"--sentence has {count} tokens, {folder} takes {longest} at most: give a shorter one."
        )
    if count > MOST_TOKENS:
        raise ValueError(
            f"--sentence has {count} tokens; attention is drawn for {MOST_TOKENS} at most: give a "
            "sentence or a paragraph."
        )
    if count < 2:
        raise ValueError("--sentence has one token: give a sentence.")
