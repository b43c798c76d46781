"""Bind the arguments of a foreign module, by their names or by an expression."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from posenc.inspect.module.inputs import Inputs

SYMBOLS = {
    "p": ("positions", "n"),
    "x": ("content", "bnw"),
    "q": ("q", "bhnw"),
    "k": ("k", "bhnw"),
    "n": ("length", ""),
    "tokens": ("tokens", ""),
    "mask": ("mask", ""),
    "scores": ("scores", ""),
    "offset": ("offset", ""),
    "dtype": ("dtype", ""),
}
"""Names that --call knows besides `module` and `torch`, with role and layout."""

CALL_HELP = (
    "p (positions, n), x (1, n, width), q and k (1, heads, n, width), n, tokens and mask (1, n), "
    "scores (1, heads, n, n), offset, dtype, module, torch"
)


@dataclass(frozen=True)
class Form:
    """One way to call a module: `target` finds what to call, `slots` its arguments.

    slots: role and layout by argument name. optional: roles that are passed only on request.
    defaults: arguments that may be left out.
    """

    name: str
    target: Callable[[nn.Module], Callable[..., Any]]
    slots: Mapping[str, tuple[str, str]]
    optional: Mapping[str, str]
    defaults: frozenset[str] = frozenset()

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role for role, _ in self.slots.values())

    @property
    def places_tokens(self) -> bool:
        """Return True if it gets the positions of its tokens; otherwise it counts from zero."""
        return bool(self.roles & {"positions", "q_positions", "kv_positions"})

    def without_positions(self) -> "Form | None":
        """Return the form without arguments that say positions; None where the module needs one."""
        placed = {name for name, (role, _) in self.slots.items() if role.endswith("positions")}
        if not placed <= self.defaults:
            return None
        slots = {name: slot for name, slot in self.slots.items() if name not in placed}
        return replace(self, slots=slots)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """Return the values of this form's arguments."""
        given = {
            name: inputs.value(role, layout, name) for name, (role, layout) in self.slots.items()
        }
        if inputs.offset and "offset" in self.optional:
            given[self.optional["offset"]] = inputs.offset
        if inputs.starts is not None:
            given[self.optional["starts"]] = inputs.starts
        return given

    def call(self, module: nn.Module, inputs: Inputs) -> Any:
        return self.target(module)(**self.arguments(inputs))


class Unbound(ValueError):
    """A method whose required arguments have no known meaning."""


def methods(module: nn.Module) -> list[str]:
    """Return names of methods to try: each `rotate_*` but `rotate_half`, then `forward`.

    Those that rotate one tensor come first, then those for a cache, then queries "and" keys.
    """
    found = [n for n in dir(type(module)) if n.startswith("rotate_") and not n.endswith("half")]
    return [*sorted(found, key=lambda n: ("_and_" in n, "cached" in n, n)), "forward"]


def forms(module: nn.Module, method: str) -> Iterator[Form]:
    """Return every way to call a method that its argument names allow, the fullest first.

    Raises: Unbound, naming the arguments that nothing explains.
    """
    parameters = inspect.signature(getattr(module, method)).parameters
    is_table, rotates = isinstance(module, nn.Embedding), method.startswith("rotate_")
    roles: dict[str, str] = {}
    optional: dict[str, str] = {}
    unknown = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = role_of(parameter, is_table, rotates)
        required = parameter.default is parameter.empty
        if role in ("offset", "starts") and not required:
            optional[role] = name
        elif role is not None and (required or role in LAYOUTS):
            roles[name] = role
        elif required:
            unknown.append(name)
    if unknown:
        raise Unbound(
            f"its argument{'s' * (len(unknown) > 1)} {', '.join(unknown)} may be anything"
        )
    defaults = frozenset(n for n, p in parameters.items() if p.default is not p.empty)
    yield from _layouts(method, roles, optional, defaults)
    fewer = {n: r for n, r in roles.items() if n not in defaults}
    if fewer != roles:  # where it stands differs from where it counts to: both are forms
        yield from _layouts(method, fewer, optional, defaults)


def _layouts(
    method: str, roles: dict[str, str], optional: dict[str, str], defaults: frozenset[str]
) -> Iterator[Form]:
    kinds = list(dict.fromkeys(_alike(role) for role in roles.values() if role in LAYOUTS))
    for chosen in product(*(LAYOUTS[kind] for kind in kinds)):
        layout = dict(zip(kinds, chosen, strict=True))
        slots = {name: (role, layout.get(_alike(role), "")) for name, role in roles.items()}
        shown = f"{'' if method == 'forward' else method}({', '.join(roles)})"
        yield Form(shown, lambda module, m=method: getattr(module, m), slots, optional, defaults)


def _alike(role: str) -> str:
    """Return the role whose layout this one shares: keys have that of queries."""
    return "q" if role == "k" else role.removeprefix("q_").removeprefix("kv_")


def from_expression(text: str) -> Form:
    """Return the form of --call, as "module(x, position_ids=p[None])".

    >>> from_expression("module(x, position_ids=p[None])").roles == {"content", "positions"}
    True

    Raises: ValueError for what is no expression, or has unknown names.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(
            f'--call must be a Python expression, as in "module(x, position_ids=p[None])": '
            f"{error.msg} in {text!r}."
        ) from error
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in names} - _BUILTINS
    made = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    made |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.Lambda) for a in n.args.args}
    used = bound - made - {"module", "torch"}
    if unknown := sorted(used - set(SYMBOLS)):
        raise ValueError(f"--call knows {CALL_HELP}; got {', '.join(unknown)} in {text!r}.")
    given = [name for name in SYMBOLS if name in used]
    compiled = compile(f"lambda {', '.join(['module', *given])}: ({text})", "--call", "eval")
    function = eval(compiled, {"torch": torch})  # the user's own line, as the import was
    slots = {name: SYMBOLS[name] for name in given}
    return Form(text, lambda module: lambda **values: function(module, **values), slots, {})


_BUILTINS = frozenset(
    ("range", "len", "int", "float", "list", "tuple", "max", "min", "dict", "None", "True", "False")
)


_NAMES = {
    "positions": "position_ids positions position pos pos_ids input_pos input_positions seq_pos "
    "token_positions cache_position timesteps timestep t ids indices",
    "q_positions": "q_positions query_positions q_pos pos_i",
    "kv_positions": "kv_positions key_positions k_positions k_pos kv_pos pos_j",
    "content": "x hidden_states tensor input inputs inputs_embeds embeddings hidden embeds "
    "token_embeddings src",
    "q": "q query queries query_states xq query_layer",
    "k": "k key keys key_states xk key_layer v value values value_states",
    "q_len": "q_len query_length qlen q_length len_q i",
    "kv_len": "kv_len key_length klen k_len kv_length len_k j",
    "length": "n length seq_len seqlen seq_length sequence_length",
    "tokens": "input_ids token_ids tokens",
    "scores": "attn scores attention_scores attn_scores logits dots sim",
    "offset": "offset past_key_values_length seqlen_offset start_pos past_length seq_offset",
    "starts": "seq_start_pos",
    "dtype": "dtype",
    "device": "device",
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}

LAYOUTS = {
    "positions": ("n", "bn"),
    "q_positions": ("n", "bn"),
    "kv_positions": ("n", "bn"),
    "content": ("bnw", "bhnw", "bnhw", "nbw"),
    "q": ("bhnw", "bnhw", "bnw"),
    "k": ("bhnw", "bnhw", "bnw"),
}
"""The shapes that arguments of a role are tried in: n tokens, b rows, h heads, w channels."""

_COUNTS = ("q_len", "kv_len", "length", "offset")


def role_of(parameter: inspect.Parameter, is_table: bool, is_rotation: bool) -> str | None:
    """Return the role of an argument; None where neither its name nor its annotation says one.

    A mask has no role, because positions passed as a mask would look like a bias. `is_table`: the
    module is an nn.Embedding, whose input is rows. `is_rotation`: the method rotates its argument,
    as in rotate(t).
    """
    name, kind = parameter.name.lower(), _annotation(parameter)
    role = _ROLES.get(name)
    if is_table and name in ("input", "x"):
        return "positions"
    if is_rotation and name in ("t", "x"):
        return "q"
    if role is None and ("LongTensor" in kind or "IntTensor" in kind or kind.startswith("Int[")):
        return "positions" if "pos" in name else None
    if role in _COUNTS and "Tensor" in kind:
        return None
    if role in ("content", "positions") and kind == "int":
        return "length" if name in ("x", "t") else None
    return role


def _annotation(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
