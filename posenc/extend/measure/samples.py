"""Split text between search and tuning on one side and measurement on the other."""

from collections.abc import Callable, Sequence

import numpy as np

from posenc.hf.checkpoint.tokenization import Windows, encode_until, pack_windows

FEWEST_DOCUMENTS_OR_PIECES = 16
"""Fewer documents are cut into this many: both halves need some, and intervals resample them."""
CHARACTERS_READ_PER_TOKEN = 8
"""How much of a text is read for each token that is needed. It is no average: English has about
four characters a token, so that this is enough for most tokenizers."""


def split_for_fitting_and_measuring(
    documents: Sequence[str], length: int
) -> tuple[list[str], list[str]]:
    """Return two lists: the documents for search and tuning, and those to measure on. Each list is
    in a fixed random order, so that its first few come from everywhere.

    Fewer than FEWEST_DOCUMENTS_OR_PIECES documents are cut into pieces first, each long enough for
    a window of `length` tokens.
    """
    texts = list(documents)
    if len(texts) < FEWEST_DOCUMENTS_OR_PIECES:
        max_pieces = -(-FEWEST_DOCUMENTS_OR_PIECES // max(1, len(texts)))
        texts = [
            piece
            for text in texts
            for piece in _cut_into_pieces(text, max_pieces, CHARACTERS_READ_PER_TOKEN * length)
        ]
    middle = len(texts) // 2
    return _shuffled(texts[:middle]), _shuffled(texts[middle:])


def sample_windows(
    encode: Callable[[str], list[int]], documents: Sequence[str], length: int, count: int
) -> Windows:
    """Return up to `count` windows of `length` tokens, from as many documents as possible.

    encode: returns the token ids of a text.

    Raises: ValueError if there is not enough text for one window.
    """
    num_tokens = length * count
    tokens_per_document = max(length, -(-num_tokens // max(1, len(documents))))
    ids_of_documents = [
        encode(_first_characters(text, CHARACTERS_READ_PER_TOKEN * tokens_per_document))[
            :tokens_per_document
        ]
        for text in documents[:count]
    ]
    if sum(map(len, ids_of_documents)) < num_tokens:
        ids_of_documents = encode_until(encode, documents, num_tokens)
    return pack_windows(ids_of_documents, length, count)


def _first_characters(text: str, max_characters: int) -> str:
    """Return the first `max_characters` characters of a text, or fewer, up to the last space among
    them."""
    if len(text) <= max_characters:
        return text
    space_index = text.rfind(" ", 0, max_characters)
    return text[: space_index if space_index > 0 else max_characters]


def _shuffled(documents: list[str]) -> list[str]:
    """Return the documents in a random order, which is the same in every run."""
    return [documents[i] for i in np.random.default_rng(0).permutation(len(documents))]


def _cut_into_pieces(text: str, max_pieces: int, min_characters: int) -> list[str]:
    """Return a text cut after spaces into up to `max_pieces` pieces of nearly equal size, of about
    `min_characters` characters or more each."""
    num_pieces = max(1, min(max_pieces, len(text) // min_characters))
    start = 0
    pieces = []
    for i in range(1, num_pieces + 1):
        stop = len(text) * i // num_pieces
        if i < num_pieces and (space_index := text.rfind(" ", start, stop)) > start:
            stop = space_index + 1
        pieces.append(text[start:stop])
        start = stop
    return pieces
