"""Split a sentence as a model reads it: tokens, whole characters as labels, words to exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from posenc.hf.checkpoint.tokenization import load_tokenizer, parse_token_ids, tokenization_kind

Span = tuple[int, int]
"""First character and end; equal for a token without text."""


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

        Raises: ValueError where the text has no such word, or a token holds more than the word.
        """
        start = self.text.find(word) if word else -1
        if start < 0:
            raise ValueError(f"--swap: {word!r} is not in the text {self.text!r}.")
        stop = start + len(word)
        indices = [i for i, (a, b) in enumerate(self.spans) if a < stop and b > start and a < b]
        first = self.spans[indices[0]][0]
        last = self.spans[indices[-1]][1]
        outside = self.text[first:start] + self.text[stop:last]
        if outside.strip():
            raise ValueError(
                f"--swap: the tokens of {word!r} hold {outside.strip()!r} as well; give whole "
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
    kind = tokenization_kind(folder, vocab_size, as_bytes=as_bytes, as_ids=as_ids)
    if kind == "ids":
        ids = parse_token_ids(text, vocab_size)
        return _labelled_sentence(text, ids, _word_spans(text), {})
    if kind == "bytes":
        start = [256] if vocab_size > 256 else []  # the id after those of all bytes
        ids = start + list(text.encode("utf-8"))
        spans = [(0, 0)] * len(start) + [
            (i, i + 1) for i, character in enumerate(text) for _ in character.encode("utf-8")
        ]
        return _labelled_sentence(text, ids, spans, dict.fromkeys(start, "[start]"))
    tokenizer = load_tokenizer(folder)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder}: its tokenizer does not say which characters a token covers; "
            "save it as tokenizer.json."
        )
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    names = dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
    return _labelled_sentence(text, ids, [tuple(s) for s in encoded["offset_mapping"]], names)


def _word_spans(text: str) -> list[Span]:
    """Return (first character, last + 1) of each word between spaces: "a bc" -> [(0, 1), (2,
    4)]."""
    spans = []
    at = 0
    for word in text.split():
        at = text.index(word, at)
        spans.append((at, at + len(word)))
        at += len(word)
    return spans


def _labelled_sentence(
    text: str, ids: Sequence[int], spans: Sequence[Span], names: dict[int, str]
) -> Sentence:
    """Return the sentence of these tokens, in groups that share a character, as bytes of one do.

    names: of the ids, for tokens without text; "·" labels a token that has no name either.
    """
    starts = [0]
    for index, (before, here) in enumerate(pairwise(spans), 1):
        shared = here[0] < before[1] and here[0] < here[1]
        if not shared:
            starts.append(index)
    groups = tuple(pairwise([*starts, len(ids)]))
    labels = []
    for first, last in groups:
        covered = text[min(a for a, _ in spans[first:last]) : max(b for _, b in spans[first:last])]
        labels.append(covered.strip() or names.get(ids[first], covered) or "·")
    return Sentence(text, tuple(ids), tuple(spans), groups, tuple(labels))
