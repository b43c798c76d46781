"""Convert text to documents, token ids and windows of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from posenc.command_line.errors import one_line
from posenc.hf.checkpoint.files import tokenizer_files

SEPARATOR = "<|endoftext|>"
VOCABULARY_FILES = (
    "tokenizer.json tokenizer.model vocab.txt vocab.json spiece.model sentencepiece.bpe.model "
    "spm.model tekken.json".split()
)
"""Every tokenizer has one of these files."""


@dataclass(frozen=True)
class Windows:
    """Hold packed windows of text.

    tokens: token ids, (windows, length). document_of_token: index of the document of each token,
    the same shape.
    """

    tokens: Tensor
    document_of_token: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def take(self, count: int) -> "Windows":
        """Return the first `count` windows."""
        return Windows(self.tokens[:count], self.document_of_token[:count])


def split_documents(text: str) -> list[str]:
    """Split a text at each SEPARATOR into documents."""
    return [part.strip() for part in text.split(SEPARATOR) if part.strip()]


def make_text_encoder(
    folder: Path, vocab_size: int, *, as_bytes: bool = False, as_ids: bool = False
) -> Callable[[str], list[int]]:
    """Return a function that takes the text of a document and returns its token ids. The first is
    the start token, if there is one.

    A checkpoint with 256 or 257 tokens and no tokenizer reads bytes; token 256, if there is one, is
    the start token. as_bytes: True to read bytes even if there is a tokenizer. as_ids: True for a
    text that is token ids between spaces.

    Raises: ValueError if there is no tokenizer where one is needed, or if both are True.
    """
    tokenization = tokenization_kind(folder, vocab_size, as_bytes=as_bytes, as_ids=as_ids)
    if tokenization == "ids":
        return lambda text: parse_token_ids(text, vocab_size)
    if tokenization == "bytes":
        start_ids = [256] if vocab_size > 256 else []
        return lambda text: start_ids + list(text.encode("utf-8"))
    tokenizer = load_tokenizer(folder)
    start_ids = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    return lambda text: start_ids + tokenizer(text, add_special_tokens=False)["input_ids"]


def tokenization_kind(
    folder: Path, vocab_size: int, *, as_bytes: bool = False, as_ids: bool = False
) -> Literal["ids", "bytes", "tokenizer"]:
    """Return how text becomes tokens for this folder: "ids" if the text is numbers, "bytes", or
    "tokenizer". The arguments are those of `make_text_encoder`. Raise ValueError if none fits."""
    if as_ids and as_bytes:
        raise ValueError("--bytes and --ids: a text is one or the other; leave one out.")
    if as_ids:
        return "ids"
    if as_bytes or (not _has_vocabulary(folder) and vocab_size in (256, 257)):
        if vocab_size < 256:
            raise ValueError(
                f"{folder}: bytes need a vocabulary of 256 tokens, the model has {vocab_size}."
            )
        return "bytes"
    if not _has_vocabulary(folder):
        raise ValueError(
            f"{folder}: no tokenizer. Put tokenizer.json next to the weights, or give --bytes or "
            "--ids."
        )
    return "tokenizer"


def _has_vocabulary(folder: Path) -> bool:
    """Return True if the folder has a file of a tokenizer's vocabulary."""
    return any((folder / name).exists() for name in VOCABULARY_FILES)


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer without running code from the folder.

    Raises: ValueError for a tokenizer that is missing, cannot be read, or needs code.
    """
    from posenc.hf.checkpoint.loading import import_quiet_transformers

    tokenizer_files(folder)
    if not _has_vocabulary(folder):  # transformers would invent one, with a mask token
        raise ValueError(f"{folder}: no tokenizer. Put tokenizer.json next to the weights.")
    try:
        return import_quiet_transformers().AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # its many classes may raise anything for a damaged file
        reason = f"its tokenizer cannot be read ({one_line(error)})."
        raise ValueError(f"{folder}: {reason}") from error


def parse_token_ids(text: str, vocab_size: int) -> list[int]:
    """Parse token ids between spaces. Raise ValueError for anything else."""
    try:
        ids = [int(word) for word in text.split()]
    except ValueError as error:
        raise ValueError(f"Token ids are whole numbers between spaces: {error}.") from None
    if any(not 0 <= i < vocab_size for i in ids):
        raise ValueError(
            f"Token ids must lie in 0 .. {vocab_size - 1}, got {min(ids)} .. {max(ids)}."
        )
    return ids


def encode_until(
    encode: Callable[[str], list[int]], documents: Sequence[str], min_tokens: int
) -> list[list[int]]:
    """Return the token ids of the first documents: as few documents as have at least `min_tokens`
    tokens together, or all if they have fewer."""
    encoded_documents: list[list[int]] = []
    num_missing = min_tokens
    for document in documents:
        if num_missing <= 0:
            break
        encoded_documents.append(encode(document))
        num_missing -= len(encoded_documents[-1])
    return encoded_documents


def require_mask_token_id(folder: Path) -> int:
    """Return the id of the mask token. Raise ValueError without a tokenizer that has one."""
    token_id = load_tokenizer(folder).mask_token_id
    if token_id is None:
        raise ValueError(f"{folder}: the tokenizer names no mask token to hide tokens with.")
    return token_id


def pack_windows(
    encoded_documents: list[list[int]], length: int, max_windows: int | None = None
) -> Windows:
    """Concatenate documents of token ids, cut them into windows of `length` tokens, and drop the
    rest. max_windows: the most windows to return; None for all.

    Raises: ValueError if there are fewer tokens than one window needs.
    """
    ids = np.fromiter((t for d in encoded_documents for t in d), dtype=np.int64)
    document_of_token = np.repeat(
        np.arange(len(encoded_documents)), [len(d) for d in encoded_documents]
    )
    num_windows = len(ids) // length
    if not num_windows:
        raise ValueError(
            f"The text has {len(ids)} tokens; one window of {length} needs at least {length}. "
            "Give a longer text."
        )
    if max_windows is not None:
        num_windows = min(num_windows, max_windows)
    kept_slice = slice(0, num_windows * length)
    return Windows(
        torch.from_numpy(ids[kept_slice].reshape(num_windows, length)),
        torch.from_numpy(document_of_token[kept_slice].reshape(num_windows, length)),
    )
