"""Check arguments of public functions, and say which to give where a call does not fit the
signature."""

import contextlib
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_CHOICES_IN_WORDS = {
    "interleaved": "interleaved=False (Llama, Qwen, a new model) or interleaved=True (GPT-J, "
    "GLM-4): weights fit only one",
    "shape": "shape=posenc.ModelShape(embed_dim, num_heads)",
    "positions": "positions=range(length), or a tensor (len) or (batch, len)",
    "q_positions": "q_positions=range(q_len)",
    "kv_positions": "kv_positions=range(kv_len)",
}
"""What to write for a required argument that is missing, by its name."""

_REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "is_causal": ("mask=posenc.masks.causal", "causal"),
    "causal": ("mask=posenc.masks.causal", "is_causal"),
    "attn_mask": ("mask=, made by posenc.masks",),
    "attention_mask": ("mask=posenc.masks.padding(attention_mask)", "valid"),
    "key_padding_mask": ("mask=posenc.masks.padding(~key_padding_mask)", "valid"),
    "window_size": ("mask=posenc.masks.sliding_window(window_size)", "window"),
    "sliding_window": ("window_size", "mask=posenc.masks.sliding_window(n)", "window"),
    "dropout": ("dropout_p",),
    "dropout_p": ("dropout",),
    "kv_cache": ("cache=posenc.KVCache()", "caches"),
    "past_key_value": ("cache=posenc.KVCache()", "caches"),
    "past_key_values": ("cache=posenc.KVCache()", "caches"),
    "position_ids": ("positions", "q_positions= and kv_positions="),
    "positions": ("q_positions= and kv_positions=",),
    "offset": ("positions", "q_positions= and kv_positions="),
    "base": ("rope_theta",),
    "theta": ("rope_theta", "base"),
    "rope_base": ("rope_theta",),
    "rotary_base": ("rope_theta",),
    "freq_base": ("rope_theta",),
    "dim": ("head_dim", "embed_dim"),
    "d_model": ("embed_dim", "head_dim"),
    "hidden_size": ("embed_dim", "head_dim"),
    "n_embd": ("embed_dim", "head_dim"),
    "embedding_dim": ("embed_dim",),
    "head_size": ("head_dim",),
    "dim_head": ("head_dim",),
    "d_head": ("head_dim",),
    "heads": ("num_heads",),
    "n_head": ("num_heads",),
    "n_heads": ("num_heads",),
    "nhead": ("num_heads",),
    "num_attention_heads": ("num_heads",),
    "kv_heads": ("num_kv_heads",),
    "n_kv_heads": ("num_kv_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "n_layers": ("num_layers",),
    "n_layer": ("num_layers",),
    "depth": ("num_layers",),
    "num_hidden_layers": ("num_layers",),
    "intermediate_size": ("ffn_dim",),
    "dim_feedforward": ("ffn_dim",),
    "layer_norm_eps": ("norm_eps",),
    "rms_norm_eps": ("norm_eps",),
    "eps": ("norm_eps",),
    "max_len": ("max_positions", "train_length"),
    "max_length": ("max_positions", "max_new_tokens", "train_length"),
    "max_seq_len": ("max_positions", "train_length"),
    "max_position_embeddings": ("max_positions", "train_length", "original_max_positions"),
    "original_max_position_embeddings": ("original_max_positions",),
    "num_embeddings": ("max_positions",),
    "rope_scaling": ("scaling=, such as posenc.YaRN(4.0, 4096)",),
    "rotary_pct": ("partial_rotary_factor", "rotary_dim"),
    "is_neox_style": ("interleaved=False for is_neox_style=True",),
    "scale_factor": ("factor",),
    "scaling_factor": ("factor",),
    "num_beam": ("num_beams",),
    "pad_token_id": ("valid=, False for padding",),
    "eos_token_id": ("stop_token",),
    "input_ids": ("tokens",),
    "q": ("query",),
    "query": ("q",),
    "k": ("key",),
    "key": ("k",),
    "v": ("value",),
    "value": ("v",),
}
"""What to write instead of an argument of another library, by its name: of several proposals, the
first whose argument the function accepts."""

_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_COLLECTING_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def explain_misfits(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public function or method. A call that does not fit its signature then raises a
    TypeError that says which arguments to give."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            sentence = describe_misfit(function, args, kwargs)
            if not sentence:  # raised inside of the function
                raise
        raise TypeError(sentence)

    return call


def explain_constructor_misfits(cls: C) -> C:
    """Wrap the constructor of a class as `explain_misfits` does, and return the class."""
    cls.__init__ = explain_misfits(cls.__init__)
    return cls


def describe_misfit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the sentence that says what is wrong with a call; "" if it fits the signature."""
    signature = inspect.signature(function)
    with contextlib.suppress(TypeError):
        signature.bind(*args, **kwargs)
        return ""
    parameters = dict(signature.parameters)
    caller = function.__name__
    first_name = next(iter(parameters), "")
    if first_name in ("self", "cls") or caller == "__init__":
        del parameters[first_name]
        cls = args[0] if first_name == "cls" else type(args[0])
        # A module is built and called by the name of its class.
        caller = cls.__name__ if caller in ("__init__", "forward") else f"{cls.__name__}.{caller}"
        args = args[1:]
    misfit = _MisfitClauses(parameters, args, kwargs)
    tail = f" It takes {_list_parameters(parameters)}." if misfit.has_unexplained_clause else ""
    return f"{caller}: {'; '.join(misfit.clauses)}.{tail}"


class _MisfitClauses:
    """Describe what is wrong with a call.

    clauses: parts of the sentence, such as "unknown argument heads, write num_heads"; empty if the
    call fits the signature.
    has_unexplained_clause: True if one of the clauses does not say what to write instead.
    """

    def __init__(
        self,
        parameters: Mapping[str, inspect.Parameter],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.parameters = parameters
        self.args = args
        self.kwargs = kwargs
        self.clauses: list[str] = []
        self.has_unexplained_clause = False
        positional_names = [name for name, p in parameters.items() if p.kind in _POSITIONAL_KINDS]
        self.names_given_by_position = positional_names[: len(args)]
        self._note_surplus(len(positional_names))
        self._note_unknown_names()
        self._note_missing()

    def _takes_any(self, kind: Any) -> bool:
        """Return True if the function takes any number of arguments of a kind.

        kind: inspect.Parameter.VAR_POSITIONAL (*args) or VAR_KEYWORD (**kwargs).
        """
        return any(p.kind is kind for p in self.parameters.values())

    def _note_surplus(self, max_positional: int) -> None:
        """Add a clause if there are more positional arguments than `max_positional`, the number
        that the function takes."""
        if self._takes_any(inspect.Parameter.VAR_POSITIONAL) or len(self.args) <= max_positional:
            return
        keyword_texts = [
            f"{name}=" for name, p in self.parameters.items() if p.kind is p.KEYWORD_ONLY
        ]
        hint = f", give the others by name ({', '.join(keyword_texts)})" if keyword_texts else ""
        self.clauses.append(
            f"at most {max_positional} arguments without a name, got {len(self.args)}{hint}"
        )

    def _note_unknown_names(self) -> None:
        """Add a clause for each keyword that the function does not take, or that a positional
        argument has given already."""
        takes_any_name = self._takes_any(inspect.Parameter.VAR_KEYWORD)
        for name in self.kwargs:
            if name in self.names_given_by_position:
                self.clauses.append(f"{name} is given twice")
            elif name not in self.parameters and not takes_any_name:
                replacement = replacement_for(name, self.parameters)
                self.clauses.append(
                    f"unknown argument {name}" + (f", write {replacement}" if replacement else "")
                )
                self.has_unexplained_clause |= not replacement

    def _note_missing(self) -> None:
        """Add clauses for the required arguments that are missing."""
        clauses_so_far = " ".join(self.clauses)  # may name what to write for a missing argument
        missing_names = [
            name
            for name, p in self.parameters.items()
            if p.default is p.empty
            and p.kind not in _COLLECTING_KINDS
            and name not in (*self.names_given_by_position, *self.kwargs)
            and f"{name}=" not in clauses_so_far
        ]
        choices_to_say = [
            _CHOICES_IN_WORDS[name] for name in missing_names if name in _CHOICES_IN_WORDS
        ]
        other_names = [name for name in missing_names if name not in _CHOICES_IN_WORDS]
        if choices_to_say:
            self.clauses.append(f"say {' and '.join(choices_to_say)}")
        if other_names:
            verb = "is" if len(other_names) == 1 else "are"
            self.clauses.append(f"{' and '.join(other_names)} {verb} missing")
            self.has_unexplained_clause = True


def replacement_for(name: str, accepted: Iterable[str]) -> str:
    """Return what to write, such as "num_heads=", for an argument `name` that is not among the
    `accepted` ones; "" if no accepted one is similar.

    >>> replacement_for("theta", ["head_dim", "rope_theta"])
    'rope_theta='
    >>> replacement_for("interleave", ["head_dim", "interleaved"])
    'interleaved='
    """
    accepted = tuple(accepted)
    for replacement in _REPLACEMENTS.get(name, ()):
        argument_name, equals, _ = replacement.partition("=")
        if argument_name in accepted:
            return replacement if equals else f"{replacement}="
    nearest = difflib.get_close_matches(name, accepted, n=1)
    return f"{nearest[0]}=" if nearest else ""


def _list_parameters(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the names of parameters with their defaults as a text, such as "q, causal=False",
    without *args and **kwargs; "none" if there are no others."""
    parameter_texts = [
        name if p.default is p.empty else f"{name}={p.default!r}"
        for name, p in parameters.items()
        if p.kind not in _COLLECTING_KINDS
    ]
    return ", ".join(parameter_texts) or "none"


LARGEST_SIZE = 2**31
"""Greatest value of an argument that is a size for which memory is allocated, such as a width."""
FARTHEST_POSITION = 2**62
"""Upper bound of positions, and of whole numbers that are added to them, so that their sums fit
int64."""


def check_count(
    caller: str, name: str, value: Any, least: int = 1, most: int = LARGEST_SIZE
) -> None:
    """Raise TypeError unless `value` is a whole number, and ValueError unless least <= value <=
    most. caller, name: the function and its argument, for the message."""
    check_number(caller, name, value, whole=True)
    if value < least:
        raise ValueError(f"{caller}: {name} must be at least {least}, got {value}.")
    if value > most:
        raise ValueError(f"{caller}: {name} must be at most {most}, got {value}.")


def check_number(caller: str, name: str, value: Any, *, whole: bool = False) -> None:
    """Raise TypeError unless `value` is a real number, or with `whole` a whole number. Raise
    ValueError for NaN and infinity. True and False are no numbers."""
    wanted = "a whole number" if whole else "a finite number"
    value_type = type(value)
    if value_type is not int and (whole or value_type is not float):
        # NumPy's numbers and sizes in a trace are numbers too.
        is_number = hasattr(value, "__index__") if whole else isinstance(value, Real)
        if value_type is bool or not is_number:
            raise TypeError(f"{caller}: {name} must be {wanted}, got {value!r}.")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{caller}: {name} must be {wanted}, got {value}.")


def check_probability(caller: str, name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a real number, ValueError unless 0 <= value < 1."""
    check_number(caller, name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{caller}: {name} must be at least 0 and below 1, got {value}.")


def check_flag(caller: str, name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{caller}: {name} must be True or False, got {value!r}.")


def check_choice(caller: str, name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{caller}: {name} must be one of {', '.join(choices)}, got {value!r}.")
