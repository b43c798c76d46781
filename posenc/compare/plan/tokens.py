"""The tokens of a study: text that a tokenizer encodes, or files that hold tokens."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from posenc.command_line.errors import one_line
from posenc.compare.options import Options
from posenc.compare.plan.check_text import FORMAT_OF_MAGIC, check_content
from posenc.compare.trial.text_tokenizer import Tokenizer, read_tokenizer
from posenc.compare.trial.windows import symbol_dtype
from posenc.files.find_texts import TextSource, find_text, standard_library_text
from posenc.files.opening import open_ordinary, read_file_bytes
from posenc.machine import hardware
from posenc.machine.hardware import check_memory_or_disk

PIECE_LETTERS = 1 << 24
"""Letters of a file that are encoded at a time, cut after a line: encoding takes 120 times the
memory of its text."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of the files of a study.

    ids: by file name, (tokens,), in memory or mapped from the disk.
    vocabulary: number of different tokens, `document_end` included.
    document_end: the token after each document; it follows each file, too.
    tokenizer: of the text; None if the tokens' bytes are not known.
    split_of_file: what a file is for, "train", "valid" or "test", where its name says so.
    """

    ids: Mapping[str, np.ndarray]
    vocabulary: int
    document_end: int
    tokenizer: Tokenizer | None = None
    split_of_file: Mapping[str, str] = field(default_factory=dict)

    def pieces(self, name: str, start: int, stop: int, length: int) -> Iterator[np.ndarray]:
        """Yield the tokens [start, stop) of a file in pieces of at most `length`, in the type of
        their file on the disk."""
        dtype = symbol_dtype(self.vocabulary)
        for first in range(start, stop, length):
            yield np.asarray(self.ids[name][first : min(first + length, stop)]).astype(dtype)

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Return the bytes that each token covers, (vocabulary,); None if they are not known. The
        end of a document counts as one, as the separator of a text of bytes does."""
        if self.tokenizer is None:
            return None
        counts = np.zeros(self.vocabulary, np.int64)
        counts[: self.tokenizer.vocab_size] = self.tokenizer.bytes_of_tokens
        counts[self.document_end] = 1
        return counts


@dataclass(frozen=True)
class TokenSettings:
    """The fields of a trial that tokens decide, see TrialConfig, and the tokenizer itself."""

    vocabulary: int
    document_end: int
    tokenizer: Tokenizer | None

    @property
    def trial_fields(self) -> dict[str, object]:
        """Return the fields of a trial by name."""
        return {
            "tokenizer": "" if self.tokenizer is None else self.tokenizer.hash,
            "vocabulary": self.vocabulary,
            "document_end": self.document_end,
        }


def token_settings(options: Options) -> TokenSettings | None:
    """Return what the tokens of the options decide; None for a text of bytes. Files of tokens are
    read once, for their largest token.

    The vocabulary is that of the tokenizer, otherwise the largest token and one more. The end of a
    document is the token of --document-end, otherwise one more than all others.
    Raises: ValueError for options that do not go together, for a tokenizer or files that cannot be
    read, and for tokens beyond the vocabulary.
    """
    _check_token_options(options)
    if options.tokenizer is None and options.tokens is None:
        return None
    tokenizer = None if options.tokenizer is None else read_tokenizer(Path(options.tokenizer))
    size = 0 if tokenizer is None else tokenizer.vocab_size
    if options.tokens is not None:
        largest = _largest_token(options, size)
        size = size or largest + 1
    if options.document_end is None:
        return TokenSettings(size + 1, size, tokenizer)
    if options.document_end >= size:
        raise ValueError(
            f"--document-end {options.document_end}: the tokens are 0 to {size - 1:,}. Give one of "
            "them, or leave it out."
        )
    return TokenSettings(size, options.document_end, tokenizer)


def _check_token_options(options: Options) -> None:
    """Raise ValueError for options of tokens that do not go together."""
    if options.text and options.tokens:
        raise ValueError("--text and --tokens: a study reads one or the other. Leave out one.")
    has_tokens = options.tokens is not None or options.tokenizer is not None
    if options.document_end is not None and not has_tokens:
        raise ValueError(
            "--document-end is a token, and a text of bytes has none. Add --tokenizer or --tokens."
        )
    if options.token_type != Options.token_type and options.tokens is None:
        raise ValueError(
            f"--token-type {options.token_type} is that of files of --tokens, and there are none. "
            "Leave it out."
        )


def text_of_options(options: Options) -> tuple[TextSource, Tokens | None, tuple[str, ...]]:
    """Return the files of the text, their tokens (None for bytes), and notes for the user.

    Raises: ValueError for a text that cannot be read, or has nothing to learn.
    """
    settings = token_settings(options)
    if options.tokens is not None and settings is not None:
        source = find_token_files(options)
        tokens = read_token_files(source, settings, options.token_type)
        return source, tokens, _notes_on_documents(tokens, options)
    source = find_text(options.text) if options.text else standard_library_text()
    note = check_content(source) if options.text else ""
    tokens = None if settings is None else encode_text(source, settings)
    notes = (f"{note}.",) if note else ()
    if tokens is not None:
        notes += _notes_on_documents(tokens, options)
    return source, tokens, notes


def _notes_on_documents(tokens: Tokens, options: Options) -> tuple[str, ...]:
    """Return a note if the token of --document-end ends no document: each file is then one, and
    another token was perhaps meant."""
    if options.document_end is None:
        return ()
    for ids in tokens.ids.values():
        pieces = (ids[i : i + _TOKENS_AT_ONCE] for i in range(0, len(ids), _TOKENS_AT_ONCE))
        if any((piece == options.document_end).any() for piece in pieces):
            return ()
    return (
        f"--document-end {options.document_end} occurs nowhere: each file counts as one document.",
    )


def encode_text(source: TextSource, settings: TokenSettings) -> Tokens:
    """Return the tokens of a text, each file encoded as a document.

    Raises: ValueError for a file that is not UTF-8, or that the tokenizer changes, and for a text
    that is larger than the memory.
    """
    assert settings.tokenizer is not None
    sizes = [path.stat().st_size for _, path in source.files]
    check_memory_or_disk(
        "The text's tokens",
        sum(sizes) // 4,  # a tokenizer that covers eight bytes with a token of two is rare
        hardware.memory_bytes(),
        "Encode it into a file, and give that as --tokens.",
    )
    dtype = symbol_dtype(settings.vocabulary)
    ids_by_name: dict[str, np.ndarray] = {}
    for name, path in source.files:
        pieces = [
            _encode_piece(piece, settings.tokenizer).astype(dtype)
            for piece in _pieces_of_text(path, settings.tokenizer)
        ]
        ids_by_name[name] = np.concatenate([np.empty(0, dtype), *pieces])
    return Tokens(ids_by_name, settings.vocabulary, settings.document_end, settings.tokenizer)


@dataclass(frozen=True)
class _Piece:
    """A piece of a file's text. first_line: the number of its first line, from 1."""

    path: Path
    text: str
    first_line: int


def _pieces_of_text(path: Path, tokenizer: Tokenizer) -> Iterator[_Piece]:
    """Yield the text of a file in pieces of at most PIECE_LETTERS, each cut after a line where it
    has one."""
    try:
        text = read_file_bytes(path, None).decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--tokenizer: {path} is not UTF-8 at byte {error.start:,}, and {tokenizer.name} reads "
            "text. Convert the file, or leave out --tokenizer to compare bytes."
        ) from None
    start = 0
    line = 1
    while start < len(text):
        stop = start + PIECE_LETTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        piece = text[start:stop]
        yield _Piece(path, piece, line)
        line += piece.count("\n")
        start = stop


def _encode_piece(piece: _Piece, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a piece of text. Raises ValueError unless they decode to the same text,
    and cover as many bytes."""
    ids = tokenizer.encode(piece.text)
    decoded = tokenizer.decode(ids)
    if decoded != piece.text:
        raise ValueError(_describe_change(piece, decoded, tokenizer))
    tokens = np.array(ids, np.int64)
    num_bytes = len(piece.text.encode())
    covered_bytes = int(tokenizer.bytes_of_tokens[tokens].sum())
    # Some tokenizers put a space in front of a text, and take it away again when they decode.
    if covered_bytes not in (num_bytes, num_bytes + 1):
        raise ValueError(
            f"--tokenizer: by their names the tokens of {tokenizer.name} cover {covered_bytes:,} "
            f"bytes of {piece.path}, which has {num_bytes:,} there, so that bits per byte cannot "
            "be counted. Give a byte-level tokenizer, or one of SentencePiece."
        )
    return tokens


def _describe_change(piece: _Piece, decoded: str, tokenizer: Tokenizer) -> str:
    """Return the message that a tokenizer changes a text, with the first place where it does."""
    text = piece.text
    shorter = min(len(text), len(decoded))
    # One comparison of arrays finds the first letter that differs.
    letters = [np.frombuffer(t[:shorter].encode("utf-32-le"), "<u4") for t in (text, decoded)]
    differing = np.flatnonzero(letters[0] != letters[1])
    place = int(differing[0]) if len(differing) else shorter
    line = piece.first_line + text.count("\n", 0, place)
    was, became = (repr(t[max(0, place - 10) : place + 10]) for t in (text, decoded))
    return (
        f"--tokenizer: {tokenizer.name} does not give back the text of {piece.path}: in line "
        f"{line:,} {was} becomes {became}. Its losses would be those of another text; give one "
        "that keeps every letter, as byte-level tokenizers do."
    )


def sizes_of_tokens(tokens: Tokens) -> dict[str, int]:
    """Return the number of tokens of each file."""
    return {name: len(ids) for name, ids in tokens.ids.items()}


def covered_bytes(tokens: Tokens, stretches: Sequence[tuple[str, int, int]], piece: int) -> int:
    """Return the bytes that the tokens of these stretches of files cover; 0 if they are not known.
    piece: tokens in memory at a time."""
    counts = tokens.token_bytes
    if counts is None:
        return 0
    total = 0
    for name, start, stop in stretches:
        for ids in tokens.pieces(name, start, stop, piece):
            total += int(counts[ids].sum())
    return total


TOKEN_FILE_SUFFIXES = (".bin", ".npy")
"""Suffixes of files of tokens: plain ids, and numpy's files."""
SAMPLE_TOKENS = 1 << 16
"""Tokens at the beginning of a file that are looked at, to see whether they are tokens."""
LARGEST_VOCABULARY = 1 << 22
"""More tokens than any tokenizer has: chosen. Two ids of 16 bits, read as one of 32, are above."""
_SPLIT_BY_NAME = {"train": "train", "val": "valid", "test": "test"}
"""What a file of tokens is for, by the beginning of its name."""


def find_token_files(options: Options) -> TextSource:
    """Return the files that --tokens names; of a folder those with TOKEN_FILE_SUFFIXES. Raises
    ValueError for a value that names none, and for other files."""
    patterns: list[str] = []
    for pattern in options.tokens or ():
        path = Path(pattern)
        if not path.is_dir():
            patterns.append(pattern)
            continue
        files = sorted(f for f in path.iterdir() if f.suffix in TOKEN_FILE_SUFFIXES)
        if not files:
            raise ValueError(f"--tokens: {path} holds no file of tokens, .bin or .npy.")
        patterns += map(str, files)
    source = find_text(patterns, option="--tokens")
    for _, path in source.files:
        if path.suffix not in TOKEN_FILE_SUFFIXES:
            raise ValueError(
                f"--tokens: {path} must end in .bin or .npy. A text is for --text, with "
                "--tokenizer."
            )
    name = ", ".join(Path(pattern).name or pattern for pattern in options.tokens or ())
    return replace(source, name=name)


def read_token_files(source: TextSource, settings: TokenSettings, token_type: str) -> Tokens:
    """Return the tokens of files, mapped from the disk. token_type: of .bin files.

    Raises: ValueError for files that cannot be read as tokens, or whose names do not say together
    what is for training and what for the tests.
    """
    ids = {name: _map_tokens(path, token_type) for name, path in source.files}
    return Tokens(
        ids,
        settings.vocabulary,
        settings.document_end,
        settings.tokenizer,
        _splits_by_file_name(source),
    )


def _splits_by_file_name(source: TextSource) -> dict[str, str]:
    """Return what each file is for, by the beginning of its name; {} if no name says it. Raises
    ValueError if only some do, or none is for training, or none for validation."""
    split_of_file: dict[str, str] = {}
    for name, path in source.files:
        for beginning, split in _SPLIT_BY_NAME.items():
            if path.name.startswith(beginning):
                split_of_file[name] = split
    unnamed_paths = [path for name, path in source.files if name not in split_of_file]
    if len(unnamed_paths) == len(source.files):
        return {}
    if unnamed_paths or not {"train", "valid"} <= set(split_of_file.values()):
        problem = (
            f"{unnamed_paths[0].name} begins with neither train, val nor test"
            if unnamed_paths
            else "train and val belong together, and one of them is missing"
        )
        raise ValueError(
            f"--tokens: {problem}. Name the files by what they are for, or none of them, to have "
            "them split."
        )
    return split_of_file


def _largest_token(options: Options, vocab_size: int) -> int:
    """Return the largest token in the files of --tokens. vocab_size: of the tokenizer; 0 for none.

    Raises: ValueError for files that cannot be read as tokens, with fewer than two different ones,
    or with one beyond the vocabulary."""
    limit = vocab_size or LARGEST_VOCABULARY
    largest = 0
    smallest = limit
    for _, path in find_token_files(options).files:
        stat = path.stat()
        bounds = _bounds_of_tokens(path, options.token_type, stat.st_size, stat.st_mtime_ns)
        if bounds is None:
            continue
        if bounds[0] < 0 or bounds[1] >= limit:
            token = bounds[0] if bounds[0] < 0 else bounds[1]
            of_whom = "the tokenizer's" if vocab_size else "any vocabulary's"
            raise ValueError(
                f"--tokens: {path} has the token {token:,}, beyond {of_whom} {limit:,}. Is it of "
                "another --token-type, or of another tokenizer?"
            )
        smallest = min(smallest, bounds[0])
        largest = max(largest, bounds[1])
    if largest <= smallest:
        raise ValueError(
            "--tokens: the files have no two different tokens, so there is nothing to predict. "
            "Give others."
        )
    return largest


@functools.cache
def _bounds_of_tokens(
    path: Path, token_type: str, size: int, modified_ns: int
) -> tuple[int, int] | None:
    """Return the smallest and the largest token of a file; None for an empty one. size,
    modified_ns: of the file, which is read again once they change."""
    ids = _map_tokens(path, token_type)
    pieces = [ids[i : i + _TOKENS_AT_ONCE] for i in range(0, len(ids), _TOKENS_AT_ONCE)]
    if not pieces:
        return None
    return min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)


_TOKENS_AT_ONCE = 1 << 24
"""Tokens of a file that are in memory at a time."""


def _map_tokens(path: Path, token_type: str) -> np.ndarray:
    """Return the tokens of a file, (tokens,), mapped from the disk. token_type: of a .bin file.

    Raises: ValueError for a file that is cut in the middle of a token, or holds something else."""
    if path.suffix == ".npy":
        return _map_npy(path)
    size = path.stat().st_size
    width = np.dtype(token_type).itemsize
    with open_ordinary(path) as file:
        beginning = file.read(width * SAMPLE_TOKENS)
    _refuse_other_content(path, beginning)
    if size % width:
        raise ValueError(
            f"--tokens: {path} has {size:,} bytes, and {token_type} takes {width} for each token: "
            "it is cut in the middle of one, or of another --token-type."
        )
    if not size:
        return np.empty(0, token_type)
    ids = np.memmap(path, dtype=f"<u{width}", mode="r")
    if token_type == "uint16":
        _refuse_halves(path, ids[:SAMPLE_TOKENS])
    return ids


def _map_npy(path: Path) -> np.ndarray:
    """Return the array of a .npy file, mapped from the disk. Raises ValueError unless it has one
    axis of whole numbers."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"--tokens: {path} cannot be read as a .npy file ({one_line(error)}). Is it whole, and "
            "of whole numbers?"
        ) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"--tokens: {path} must have one axis of whole numbers, such as uint16, got "
            f"{ids.dtype} of shape {ids.shape}."
        )
    return ids


def _refuse_other_content(path: Path, beginning: bytes) -> None:
    """Raise ValueError for a .bin file that is packed, or text."""
    for magic, format_name in FORMAT_OF_MAGIC.items():
        if beginning.startswith(magic) and not magic.isalnum():
            raise ValueError(f"--tokens: {path} is a {format_name} file, and holds no tokens.")
    if not beginning or b"\0" in beginning:  # a token below 256 has a zero byte
        return
    try:
        beginning[: len(beginning) // 2].decode()
    except UnicodeDecodeError as error:
        # A letter that the cut divides is no sign of tokens.
        if error.start < len(beginning) // 2 - 4:
            return
    raise ValueError(f"--tokens: {path} is text. Give it as --text, with --tokenizer.")


def _refuse_halves(path: Path, ids: np.ndarray) -> None:
    """Raise ValueError for ids of 32 bits that were read as twice as many of 16: every second one
    is then the upper half of an id, which is small."""
    upper_halves = ids[1::2]
    lower_halves = ids[0::2]
    largest_half = (LARGEST_VOCABULARY - 1) >> 16
    are_halves = len(upper_halves) and int(upper_halves.max()) <= largest_half
    if are_halves and int(lower_halves.max()) > largest_half:
        raise ValueError(
            f"--tokens: every second token of {path} is {largest_half} or less, as if it held ids "
            "of 32 bits. Add --token-type uint32."
        )
