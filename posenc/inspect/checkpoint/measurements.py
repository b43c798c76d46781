"""Measure everything about one checkpoint, as requested."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from posenc.hf.checkpoint.loading import Checkpoint, load_checkpoint
from posenc.hf.checkpoint.tokenization import tokenization_kind
from posenc.inspect.checkpoint import positions, structure
from posenc.inspect.checkpoint import reading as readings
from posenc.inspect.checkpoint.positions import (
    Bias,
    Disentangled,
    PositionSource,
    PositionTable,
    Rotation,
)
from posenc.inspect.checkpoint.reading import Reading
from posenc.inspect.checkpoint.sentence import Sentence, tokenize_sentence
from posenc.inspect.checkpoint.structure import Structure
from posenc.inspect.checkpoint.swap import Swap, swap_words

DEFAULT_TEXT = "The company bought its rival."
DEFAULT_WORDS = ("company", "rival")
"""Words of DEFAULT_TEXT that are exchanged."""
NUM_DEFAULT_IDS = 16
"""Token ids that are read by default where there is no tokenizer; chosen, not derived."""
MAX_TOKENS = 512
"""Most tokens of a text; chosen, not derived. The attention of all heads is kept, so a text is a
sentence or a paragraph."""

Origin = Literal["user", "default text", "default ids"]

_KINDS_IN_JSON: dict[type[PositionSource], str] = {
    Rotation: "rotation",
    PositionTable: "table",
    Bias: "bias",
    Disentangled: "disentangled",
}
"""The value of "kind" in --json for each source of positions."""


@dataclass(frozen=True)
class Request:
    """What to measure of a checkpoint, as the command line says.

    folder: of the checkpoint. text: to read, None for a default. words: of the text, to exchange;
    None for those of the default text. layers: whose attention is drawn; empty for as many as fit.
    as_bytes, as_ids: read the text as bytes, or as token ids, without a tokenizer.
    """

    folder: Path
    text: str | None = None
    words: tuple[str, str] | None = None
    layers: Sequence[int] = ()
    as_bytes: bool = False
    as_ids: bool = False


@dataclass(frozen=True)
class CheckpointSheet:
    """Findings about positions in a checkpoint.

    longest: tokens that its config allows, None without a limit. masked: it predicts masked tokens
    instead of the next one. text_origin: whose text was read: the user's, DEFAULT_TEXT, or token
    ids spread over the vocabulary. swap: None if no words were exchanged.
    """

    folder: Path
    structure: Structure
    longest: int | None
    masked: bool
    positions: list[PositionSource]
    sentence: Sentence
    text_origin: Origin
    reading: Reading
    swap: Swap | None

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts; attention as its mean distances."""
        distances = {name or "all": d.tolist() for name, d in self.reading.distances().items()}
        return {
            "folder": str(self.folder),
            "structure": dataclasses.asdict(self.structure)
            | {"parameters": self.structure.parameters},
            "longest": self.longest,
            "causal": self.reading.causal,
            "positions": [
                {"kind": _KINDS_IN_JSON[type(source)], **dataclasses.asdict(source)}
                for source in self.positions
            ],
            "text": self.sentence.text,
            "tokens": list(self.sentence.labels),
            "token_ids": list(self.sentence.ids),
            "attention_distance": distances,
            "swap": self.swap and dataclasses.asdict(self.swap),
        }


def measure_checkpoint(
    request: Request, tell: Callable[[str], None] = lambda step: None
) -> CheckpointSheet:
    """Load a checkpoint, read the sentence, exchange the words, and return all findings.

    tell: is called with the name of each step as it begins.

    Raises: ValueError for a folder that cannot be loaded, or a text that does not fit it.
    """
    tell(f"loading {request.folder}")
    # eager: the one that shows its weights
    checkpoint = load_checkpoint(request.folder, encoder_decoder=True, attention="eager")
    model = checkpoint.model
    text, words, origin = _text_and_words(request, checkpoint)
    vocabulary = checkpoint.config.vocab_size
    sentence = tokenize_sentence(
        request.folder, vocabulary, text, as_bytes=request.as_bytes, as_ids=request.as_ids
    )
    longest = checkpoint.max_positions
    _check_length(sentence, longest, request.folder)
    if words:
        # A missing word is refused before the model runs.
        _ = [sentence.tokens_of(word) for word in words]
    built = structure.measure_structure(model)
    if wrong := [layer for layer in request.layers if not 0 <= layer < built.layers]:
        raise ValueError(
            f"--layer: layers are 0 .. {built.layers - 1}, got {', '.join(map(str, wrong))}."
        )
    tell("reading the text")
    sources = positions.find_positions(checkpoint)
    with readings.recorded_relative_scores(model) as relative_scores:
        reading = readings.read_sentence(model, sentence.ids)
    sources = [
        source.with_means(relative_scores[0])
        if isinstance(source, Disentangled) and relative_scores
        else source
        for source in sources
    ]
    exchanged = None
    if words:
        tell("exchanging two words")
        with torch.inference_mode():
            exchanged = swap_words(model, sentence, words, checkpoint.masked)
    masked = checkpoint.masked
    return CheckpointSheet(
        request.folder, built, longest, masked, sources, sentence, origin, reading, exchanged
    )


def _text_and_words(
    request: Request, checkpoint: Checkpoint
) -> tuple[str, tuple[str, str] | None, Origin]:
    """Return the text, the words to exchange, and whose text it is."""
    if request.text is not None:
        return request.text, request.words, "user"
    vocabulary = checkpoint.config.vocab_size
    kind = tokenization_kind(
        request.folder, vocabulary, as_bytes=request.as_bytes, as_ids=request.as_ids
    )
    if kind == "ids":
        count = min(NUM_DEFAULT_IDS, vocabulary)
        ids = [str(i * vocabulary // count) for i in range(count)]
        # By default, ids at a third and at two thirds of the text.
        words = request.words or (ids[count // 3], ids[2 * count // 3])
        return " ".join(ids), words, "default ids"
    return DEFAULT_TEXT, request.words or DEFAULT_WORDS, "default text"


def _check_length(sentence: Sentence, longest: int | None, folder: Path) -> None:
    """Raise ValueError for a sentence of one token, of more than MAX_TOKENS, or of more than the
    model can read."""
    count = len(sentence)
    if longest is not None and count > longest:
        raise ValueError(
            f"--sentence has {count} tokens, {folder} takes {longest} at most: give a shorter one."
        )
    if count > MAX_TOKENS:
        raise ValueError(
            f"--sentence has {count} tokens; attention is drawn for {MAX_TOKENS} at most: give a "
            "sentence or a paragraph."
        )
    if count < 2:
        raise ValueError("--sentence has one token: give a sentence.")
