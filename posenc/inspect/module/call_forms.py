"""Call a module in a form that fits what it returns, and make the arguments of the call."""

import inspect
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

NUM_HEADS, WIDTH = 8, 64
"""Heads, and channels of a token or of a head, unless the command says others."""

_SCORE_MOD_ARGUMENTS = ("score", "batch", "head", "q_idx", "kv_idx")
"""Arguments of FlexAttention's score_mod."""

CALLS_BY_RETURN: dict[str, tuple[tuple[str, ...], ...]] = {
    "cos-sin": (("x", "positions"), ("positions",)),
    "rotate": (("q", "k", "positions"), ("x", "positions"), ("x",)),
    "bias": (("q_len", "kv_len"), ("n",)),
    "scores": (("scores",), _SCORE_MOD_ARGUMENTS),
    "add": (("x",), ("x", "positions")),
}
"""The calls that are tried by what a module returns, the word of --as: for each the words that
name the values of its required arguments, in order; see `Inputs.argument_value`."""

RETURNS_IN_WORDS = {
    "cos-sin": "cosines and sines by position, or both as one complex tensor",
    "rotate": "the rotated queries and keys, or x rotated, in the same shape",
    "bias": "a bias (heads, q_len, kv_len) of the scores",
    "scores": "the scores with the bias added",
    "add": "x with its positions added, or a row for each position",
}
"""What a module must return, by the word of --as."""

_SELF_EXPLAINING_NAMES = frozenset(
    ("x", "q", "k", "positions", "n", "q_len", "kv_len", "scores", "dtype")
)
"""Names of arguments that say by themselves what they get, as in an adapter."""
_OPTIONAL_NAMES = frozenset(("offset", "starts"))
"""Optional arguments by name: a number added to the positions that the module counts, and for each
row of the batch the index of its first token that is no padding."""

_CONTENT_SHAPES = {"rotate": ("bhnw", "bnw"), "add": ("bnw", "nbw")}
"""Shapes of x, q and k to try, in this order: b rows, h heads, n tokens, w channels."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of one forward call of the module under inspection.

    positions: (len) or (batch, len), int64. width: channels of one token, or of one head.
    probe: the content of every token, (width); None: random content, the same for all tokens, so
        that their results can differ by position only. changed_token: index of a token that gets
        another content; None for none.
    num_heads: heads of queries, keys and scores.
    num_queries: number of tokens at the end that are queries; None: all.
    offset: a number that the module adds to the positions it counts itself, as after a cache.
    starts: (batch), the index of each sequence's first token that is not padding.
    """

    positions: Tensor
    width: int = WIDTH
    dtype: torch.dtype = torch.float32
    probe: Tensor | None = None
    changed_token: int | None = None
    num_heads: int = NUM_HEADS
    num_queries: int | None = None
    offset: int = 0
    starts: Tensor | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens in a row of the batch."""
        return self.positions.shape[-1]

    @property
    def batch(self) -> int:
        """Return the number of rows: those of `starts`, or without it those of `positions`."""
        num_rows = 1 if self.positions.ndim == 1 else self.positions.shape[0]
        return num_rows if self.starts is None else len(self.starts)

    def argument_value(self, word: str, content_shape: str, flat_positions: bool) -> Any:
        """Return the value of the argument that a word stands for: "n" -> 24, the number of tokens.

        word: of CALLS_BY_RETURN, _SELF_EXPLAINING_NAMES or _OPTIONAL_NAMES. content_shape: the axes
        of x, q and k, as in _CONTENT_SHAPES. flat_positions: True: positions of a batch of one are
        (n), not (1, n).
        """
        match word:
            case "positions":
                positions = self.positions.clone()  # which the module may write into
                return positions if flat_positions or positions.ndim == 2 else positions[None]
            case "x" | "q" | "k":
                return self._content_in_shape(word, content_shape)
            case "n" | "kv_len":
                return self.length
            case "q_len":
                return self.length if self.num_queries is None else self.num_queries
            case "scores":
                return torch.zeros(1, self.num_heads, self.length, self.length, dtype=self.dtype)
            case "dtype":
                return self.dtype
            case "offset":
                return self.offset
            case "starts":
                return self.starts
        return self._score_mod_argument(word)

    def _score_mod_argument(self, word: str) -> Tensor:
        """Return the value of one of _SCORE_MOD_ARGUMENTS. FlexAttention passes single numbers;
        these are tensors that broadcast to (heads, len, len), for all scores in one call."""
        match word:
            case "score":
                return torch.zeros(self.num_heads, self.length, self.length, dtype=self.dtype)
            case "batch":
                return torch.tensor(0)
            case "head":
                return torch.arange(self.num_heads)[:, None, None]
            case "q_idx":
                return torch.arange(self.length)[:, None]
            case "kv_idx":
                return torch.arange(self.length)
        raise AssertionError(word)

    def _content_in_shape(self, word: str, shape: str) -> Tensor:
        """Return x, q or k in the shape that the letters of `shape` name: b for batch, h for heads,
        n for tokens, w for width, as "bhnw"."""
        content = self._content(word)
        if word == "q" and self.num_queries is not None:
            content = content[:, -self.num_queries :]
        if shape == "bhnw":
            return content[:, None].repeat(1, self.num_heads, 1, 1)
        return content if shape == "bnw" else content.transpose(0, 1).contiguous()

    def _content(self, name: str) -> Tensor:
        """Return x, q or k, as `name` says, as (batch, len, width): every token has the content
        `probe`, or without it random numbers that bfloat16 represents exactly and that differ
        between x, q and k. `changed_token` has another content."""
        if self.probe is None:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            # Rounded to bfloat16, it is the same in every dtype.
            vector = torch.randn(self.width, generator=generator).bfloat16()
        else:
            vector = self.probe
        content = vector.to(self.dtype).repeat(self.batch, self.length, 1)
        if self.changed_token is not None:
            # Any other content does: other channels, sign, length and mean, even for zeros.
            content[:, self.changed_token] = -2 * content[:, self.changed_token].flip(-1) + 1
        return content


@dataclass(frozen=True)
class CallForm:
    """A way to call a module.

    positional_words, keyword_words: the arguments by place and by keyword, as words such as "x" or
    "positions", which name their values. can_count_positions: True if the module counts
    positions itself in a call without them. optional_names: arguments of _OPTIONAL_NAMES that it
    takes, which only some checks pass. content_shape, flat_positions: see `Inputs.argument_value`.
    """

    positional_words: tuple[str, ...]
    keyword_words: tuple[str, ...]
    can_count_positions: bool
    optional_names: frozenset[str]
    content_shape: str
    flat_positions: bool

    @property
    def words(self) -> frozenset[str]:
        """Return the words, as "x" or "positions", of all arguments that it always gets."""
        return frozenset((*self.positional_words, *self.keyword_words))

    @property
    def takes_positions(self) -> bool:
        """Return True if it gets the positions of its tokens; otherwise it counts from zero."""
        return "positions" in self.words

    @property
    def call_in_words(self) -> str:
        """Return how the module is called, as text: "(x, positions), x (1, n, width)"."""
        arguments_in_words = f"({', '.join([*self.positional_words, *self.keyword_words])})"
        content_words = [word for word in ("x", "q", "k") if word in self.words]
        if not content_words:
            return arguments_in_words
        axis_sizes = {"b": "1", "h": "heads", "n": "n", "w": "width"}
        shape_in_words = ", ".join(axis_sizes[letter] for letter in self.content_shape)
        return f"{arguments_in_words}, {' and '.join(content_words)} ({shape_in_words})"

    def without_positions(self) -> "CallForm | None":
        """Return this form without positions, so that the module counts them; None if it must be
        given them."""
        if not self.can_count_positions:
            return None
        return replace(
            self, keyword_words=tuple(word for word in self.keyword_words if word != "positions")
        )

    def arguments(self, inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with these inputs: a list of those by place, and a dict of
        those by keyword."""
        keyword_words = list(self.keyword_words)
        if inputs.offset and "offset" in self.optional_names:
            keyword_words.append("offset")
        if inputs.starts is not None:
            keyword_words.append("starts")
        shape_options = (self.content_shape, self.flat_positions)
        args = [inputs.argument_value(word, *shape_options) for word in self.positional_words]
        return args, {word: inputs.argument_value(word, *shape_options) for word in keyword_words}

    def call(self, module: nn.Module, inputs: Inputs) -> Any:
        """Call the module with these inputs; return what it returns."""
        args, kwargs = self.arguments(inputs)
        return module(*args, **kwargs)


def calls_in_words(as_word: str) -> str:
    """Return the arguments that a module may take by a word of --as, as text.

    >>> calls_in_words("add")
    '(x) or (x, positions)'
    """
    return " or ".join(f"({', '.join(words)})" for words in CALLS_BY_RETURN[as_word])


class UnknownArguments(ValueError):
    """Raised for a module whose required arguments are those of no call in CALLS_BY_RETURN."""


def possible_forms(module: nn.Module, as_word: str) -> Iterator[CallForm]:
    """Yield the forms in which to try a module that returns `as_word`, the word of --as: one for
    each shape of its content and of its positions.

    If all required arguments have names of _SELF_EXPLAINING_NAMES, each gets what its name says. If
    not, they get, in order, the values of the call in CALLS_BY_RETURN that has as many arguments.

    Raises: UnknownArguments if no call has as many.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    named_parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required_parameters = [p for p in named_parameters if p.default is p.empty]
    names = tuple(p.name for p in required_parameters)
    positional_words: tuple[str, ...] = ()
    keyword_words: tuple[str, ...] = ()
    if names and _SELF_EXPLAINING_NAMES.issuperset(names):
        keyword_words = names
    else:
        positional_words = _words_in_order(required_parameters, as_word)
    optional_names = {p.name for p in named_parameters if p.default is not p.empty}
    keyword_words += tuple(word for word in ("positions", "dtype") if word in optional_names)
    can_count_positions = "positions" in optional_names or "positions" not in (
        *positional_words,
        *keyword_words,
    )
    flat_options = (True, False) if "positions" in (*positional_words, *keyword_words) else (True,)
    for content_shape, flat_positions in product(
        _CONTENT_SHAPES.get(as_word, ("bnw",)), flat_options
    ):
        yield CallForm(
            positional_words,
            keyword_words,
            can_count_positions,
            _OPTIONAL_NAMES & optional_names,
            content_shape,
            flat_positions,
        )


def _words_in_order(required_parameters: list[inspect.Parameter], as_word: str) -> tuple[str, ...]:
    """Return the call in CALLS_BY_RETURN[returns] that has as many arguments as are required.

    Raises: UnknownArguments if there is none, or if an argument cannot be given by place.
    """
    can_be_positional = not any(p.kind is p.KEYWORD_ONLY for p in required_parameters)
    for words in CALLS_BY_RETURN[as_word]:
        if len(words) == len(required_parameters) and can_be_positional:
            return words
    names_of_required = ", ".join(p.name for p in required_parameters)
    raise UnknownArguments(
        f"it takes ({names_of_required}), and --as {as_word} calls {calls_in_words(as_word)}"
    )
