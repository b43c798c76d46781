"""The tokenizer of a study: text to tokens and back, and the bytes that each token covers."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from posenc.command_line.errors import one_line
from posenc.lazy import require_package

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
"""The file that the package tokenizers writes."""
_SPACE_OF_SENTENCEPIECE = "\u2581"
"""The letter that stands for a space in the tokens of SentencePiece."""
_BYTE_PATTERN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte, where a tokenizer falls back to bytes."""


class TextTokenizer(Protocol):
    """Encode text as tokens, and decode them."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


class ByteTokenizer:
    """Encode text as the bytes of its UTF-8.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!")
    [195, 169, 33]
    >>> tokenizer.decode([195, 169, 33, 256])
    'é!'
    """

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; what is none, such as the symbol after a file, is left out, and
        a letter that is cut becomes a replacement character."""
        return bytes(symbol for symbol in ids if symbol < 256).decode(errors="replace")


class Tokenizer:
    """Encode text as tokens and decode them, without the special tokens, the padding and the
    truncation that a tokenizer may add by itself.

    hash: of its content. vocab_size: its largest id and one more.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", name: str) -> None:
        """name: what messages call it."""
        backend.no_padding()
        backend.no_truncation()
        self.name = name
        self._backend = backend
        self.content = backend.to_str()
        self.hash = hashlib.sha256(self.content.encode()).hexdigest()[:16]
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with that of special ones; an id that no token has is left
        out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def bytes_of_tokens(self) -> np.ndarray:
        """The bytes that each token covers, (vocab_size,), as its name says: 0 for an id that no
        token has."""
        count_bytes = self._byte_counter()
        counts = np.zeros(self.vocab_size, np.int64)
        added_ids = self._backend.get_added_tokens_decoder()
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            is_added = token_id in added_ids
            counts[token_id] = len(token.encode()) if is_added else count_bytes(token)
        return counts

    def _byte_counter(self) -> Callable[[str], int]:
        """Return the function that counts the bytes of a token that is not added: a letter is a
        byte in byte-level tokenizers; elsewhere a token is its letters in UTF-8, the letter of
        SentencePiece for a space, or <0x0A> for a byte."""
        decoder = json.loads(self.content).get("decoder")
        if '"ByteLevel"' in json.dumps(decoder):
            return len

        def count_bytes(token: str) -> int:
            if _BYTE_PATTERN.fullmatch(token):
                return 1
            return len(token.replace(_SPACE_OF_SENTENCEPIECE, " ").encode())

        return count_bytes


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of --tokenizer: a tokenizer.json, or a Hugging Face folder.

    Raises: ValueError for a path that has none, or one that cannot be read.
    """
    require_package("tokenizers", "--tokenizer")
    import tokenizers

    file = path / TOKENIZER_FILE if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        backend = _backend_of_folder(path)
    elif not file.is_file():
        raise ValueError(
            f"--tokenizer: {path} is not there. Give a tokenizer.json, or a Hugging Face folder."
        )
    else:
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # what the library raises has no class of its own
            raise ValueError(
                f"--tokenizer: {file} is no tokenizer.json that can be read ({one_line(error)}). "
                "Give one that the package tokenizers has written, or a Hugging Face folder."
            ) from None
    tokenizer = Tokenizer(backend, str(path))
    if tokenizer.vocab_size < 2:
        raise ValueError(
            f"--tokenizer: {path} has a vocabulary of {tokenizer.vocab_size}, and there is nothing "
            "to predict among fewer than two tokens. Give another."
        )
    return tokenizer


def _backend_of_folder(folder: Path) -> Any:
    """Return the tokenizer of a folder without tokenizer.json, as transformers converts it. Raises
    ValueError where it cannot."""
    from posenc.hf.checkpoint.tokenization import load_tokenizer  # it loads torch

    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"--tokenizer: {folder} has a tokenizer that transformers cannot write as a "
            "tokenizer.json. Give a folder with that file."
        )
    return backend
