"""Public signatures have shapes, which the tests check in every call."""

import ast
import inspect
import re
import sys
import textwrap
from types import FunctionType

import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

import posenc
from tests import shapes


@shapes.checked
def product(a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner columns"], wrong: str = ""):
    return a @ b


@shapes.checked
def transposed(x: Float[Tensor, "rows columns"], good: bool) -> Float[Tensor, "columns rows"]:
    return x.mT if good else x


@shapes.checked
def counted(x: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    if x.ndim != 1:
        raise ValueError("counted: one axis, please.")
    return x.cumsum(0)


Column = Float[Tensor, "rows 1"]


@shapes.checked
def first(x: Float[Tensor, "rows columns"], good: bool) -> "Column | None":
    return x[:, :1] if good else x[:1]


def test_a_name_that_stands_for_a_shape_is_looked_up():
    assert shapes.has_shapes(first)
    assert first(torch.ones(2, 3), True).shape == (2, 1)
    with pytest.raises(TypeCheckError):
        first(torch.ones(2, 3), False)


def test_a_call_like_one_that_was_right_is_checked_where_it_differs():
    for _ in range(2):
        assert transposed(torch.ones(2, 3), True).shape == (3, 2)
        assert first(torch.ones(2, 3), True).shape == (2, 1)
        for wrong in (transposed, first):
            with pytest.raises(TypeCheckError):
                wrong(torch.ones(2, 3), False)
        with pytest.raises(TypeCheckError):
            counted(torch.ones(3))
        counted(torch.arange(3))
        with pytest.raises(TypeCheckError):
            counted(x=torch.ones(3))


@shapes.checked
def repeated(count: int) -> Float[Tensor, "{count}"]:
    return torch.ones(3)


def test_sizes_that_follow_arguments_are_computed_at_each_call():
    assert len(repeated(3)) == 3
    with pytest.raises(TypeCheckError):
        repeated(2)


def test_right_shapes_pass():
    assert product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert transposed(torch.ones(2, 3), True).shape == (3, 2)
    assert counted(torch.arange(3)).tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    "call",
    [
        lambda: transposed(torch.ones(2, 3), False),
        lambda: transposed(torch.ones(2, 3, 4), True),
        lambda: product(torch.ones(5, 2, 3), torch.ones(3, 4)),
        lambda: counted(torch.ones(3)),
    ],
    ids=["result", "argument", "broadcast", "dtype"],
)
def test_planted_lies_are_seen(call):
    with pytest.raises(TypeCheckError):
        call()


def test_refusals_keep_their_own_words():
    with pytest.raises(ValueError, match="one axis, please"):
        counted(torch.zeros(2, 2, dtype=torch.int64))


def test_a_compiler_traces_the_function_itself():
    traced = torch.compile(product, fullgraph=True, backend="eager")
    assert torch.equal(traced(torch.ones(2, 3), torch.ones(3, 4)), torch.full((2, 4), 3.0))
    exported = torch.export.export(_Module(), (torch.ones(2, 3),)).module()
    assert torch.equal(exported(torch.ones(2, 3)), torch.ones(3, 2))


class _Module(torch.nn.Module):
    @shapes.checked
    def forward(self, x: Float[Tensor, "rows columns"]) -> Float[Tensor, "columns rows"]:
        return x.mT


def test_it_cannot_come_too_late():
    with pytest.raises(RuntimeError, match=r"posenc.* imported before"):
        shapes.install()


def modules():
    """What the public names are made of."""
    for name in (*posenc.__all__, "masks", "positions"):
        getattr(posenc, name)
    return [module for name, module in sys.modules.items() if name.startswith("posenc.")]


def functions(module):
    """Functions and methods that the module itself defines, with their names."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for method, function in vars(value).items():
                function = shapes.inner(function)
                if isinstance(function, FunctionType):
                    yield f"{name}.{method}", function
        elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield name, value


def test_every_shape_in_a_signature_is_checked():
    seen = 0
    for module in modules():
        for name, function in functions(module):
            if shapes.has_shapes(function):
                assert shapes.is_checked(function), f"{module.__name__}.{name}"
                seen += 1
    assert seen > 40


class _Headless(posenc.ALiBi):
    def bias_of_pairs(self, q_positions, kv_positions, double=False):
        return super().bias_of_pairs(q_positions, kv_positions, double)[0]


class _Swapped(posenc.RoPE):
    def transform(self, q, k):
        return q.x.mT, k.x


X, WHERE = torch.zeros(1, 2, 3, 8), torch.arange(3)
WRONG = {
    "terms": lambda: posenc.Tokens(X, torch.arange(4)),
    "encoding": lambda: _Headless(2)(WHERE, WHERE),
    "scores": lambda: posenc.FoX(8, 2).state(X[0], torch.arange(4)),
    "values": lambda: posenc.Shaw(8).table_row(torch.ones(3)),
    "queries_keys": lambda: _Swapped(8, interleaved=False)(X, X, WHERE),
    "attend": lambda: posenc.KVCache().append(X, X[:, :1], WHERE),
}
"""For each room a wrong shape that broadcasts or is not looked at: only the annotation sees it."""


@pytest.mark.parametrize("room", WRONG)
def test_a_wrong_shape_is_seen_in_every_room(room: str):
    with pytest.raises(TypeCheckError):
        WRONG[room]()


# What a callable takes and gives is seen by its caller alone, so it says Tensor: see
# linear_attention's `feature_map`. The same holds of shapes that depend on values, such as how many
# components a position has: `*axes` leaves them to the checks in encodings.base.check_inputs.
CALLABLE = re.compile(r"Callable\[\[[^]]*\], \w+(\[[^]]*\])?\]")
SHAPED = re.compile(r"""\w+\[Tensor, ("[^"]*"|'[^']*')\]""")


def is_bare(hint: object) -> bool:
    """Whether it names a tensor and not its shape."""
    return re.search(r"\bTensor\b", SHAPED.sub("", CALLABLE.sub("", str(hint)))) is not None


@pytest.mark.parametrize(
    "hint", ["Tensor", "Tensor | None", "tuple[Tensor, ...]", 'Float[Tensor, "n"] | Tensor']
)
def test_a_bare_tensor_is_seen(hint: str):
    assert is_bare(hint)
    assert not is_bare(hint.replace("Tensor", 'Float[Tensor, "n"]'))


def written(function: FunctionType) -> list[str]:
    """Annotations as the source writes them; none for what a dataclass makes."""
    if function.__code__.co_filename == "<string>":
        return []
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    hints = [node.annotation for node in ast.walk(tree.args) if isinstance(node, ast.arg)]
    shown = [hint for hint in [*hints, tree.returns] if hint is not None]
    return [hint.value if isinstance(hint, ast.Constant) else ast.unparse(hint) for hint in shown]


def test_a_bare_tensor_is_seen_in_a_signature():
    def bare(x: Tensor) -> 'Float[Tensor, "n"] | None': ...

    assert list(map(is_bare, written(bare))) == [True, False]


def is_public(owner: object, module: str) -> bool:
    """Whether users reach it: a public name, or a class above or below one, whose methods they
    call on what they made or were handed."""
    if module.startswith(("posenc.masks", "posenc.positions")):
        return True
    public = [getattr(posenc, name) for name in posenc.__all__]
    return owner in public or any(
        owner in each.__mro__ or each in getattr(owner, "__mro__", ())
        for each in public
        if inspect.isclass(each)
    )


def test_public_signatures_name_their_shapes():
    bare = set()
    for module in modules():
        for name, function in functions(module):
            owner = vars(module)[name.partition(".")[0]]
            if "._" in f".{name}".replace(".__init__", "") or not is_public(owner, module.__name__):
                continue
            if any(map(is_bare, written(inspect.unwrap(function)))):
                bare.add(f"{module.__name__.removeprefix('posenc.')}.{name}")
    assert bare == set()
