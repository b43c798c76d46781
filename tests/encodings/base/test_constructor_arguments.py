"""No encoding is built from numbers that no model can have."""

import inspect
import math

import pytest

import posenc
from posenc.encodings.registry import encoding_class

SHAPE = posenc.ModelShape(64, 4, train_length=16)
CLASSES = tuple(dict.fromkeys(encoding_class(name) for name in posenc.names()))
MEANT = {
    "embed_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "interleaved": False,
    "window": 8,
    "chunk_size": 8,
    "local_window": 2,
    "max_positions": 16,
    "height": 4,
    "width": 4,
    "train_length": 16,
    "inner": posenc.ALiBi(4),
    "floor_scale": 8,
    "max_distance": 8,
    "num_layers": 2,
    "rotation": posenc.RoPE(16, interleaved=False),
}
WRONG = {
    "bool": ("no", 1, None),
    "int": (math.nan, math.inf, 2.5, "8", True, None),
    "float": (math.nan, math.inf, -math.inf, "8", True, None),
}


def arguments() -> list[tuple[type, str, object]]:
    """Return (class, name, wrong value) for arguments of all constructors that are numbers or
    flags: for the first argument with each annotation every wrong value, for the others one."""
    found, known = [], set()
    for kind in CLASSES:
        for name, parameter in inspect.signature(kind).parameters.items():
            first, _, more = str(parameter.annotation).partition(" | ")
            every = WRONG.get(first, ())
            for wrong in every[:1] if (first, more) in known else every:
                if not (more == "None" and wrong is None) and more in ("", "None"):
                    found.append((kind, name, wrong))
                    known.add((first, more))
    return found


@pytest.mark.parametrize(("kind", "name", "wrong"), arguments())
def test_an_argument_that_is_no_number_is_named(kind, name, wrong):
    needed = {
        n: MEANT[n] for n, p in inspect.signature(kind).parameters.items() if p.default is p.empty
    }
    kind(**needed)
    with pytest.raises((TypeError, ValueError), match=rf"{kind.__name__}: {name} must be "):
        kind(**{**needed, name: wrong})


def test_an_own_class_may_give_such_names_another_meaning():
    class Own(posenc.DistanceBias):
        def __init__(self, max_distance: int = 0, extent: float = 0.5) -> None:
            super().__init__()

    Own(0, extent=0.25)
    with pytest.raises(TypeError, match="Own: max_distance must be a whole number"):
        Own(0.5)

    class Further(posenc.Shaw):
        pass

    with pytest.raises(ValueError, match="Further: max_distance must be at least 1, got 0"):
        Further(16, max_distance=0)


@pytest.mark.parametrize("name", ["embed_dim", "num_heads", "head_dim", "num_kv_heads"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_begin_at_one(name, size):
    asked = 0
    for kind in CLASSES:
        parameters = inspect.signature(kind).parameters
        if name not in parameters or kind is posenc.RNoPE:
            continue
        needed = {n: MEANT[n] for n, p in parameters.items() if p.default is p.empty}
        with pytest.raises(ValueError, match=rf"{name} must be at least 1, got {size}"):
            kind(**{**needed, name: size})
        asked += 1
    assert asked


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: posenc.RoPE(8, -1.0, interleaved=False), "rope_theta must be positive"),
        (lambda: posenc.AxialRoPE(8, 0, interleaved=False), "rope_theta must be positive"),
        (lambda: posenc.SinCos2D(8, base=-1), "base must be positive"),
        (lambda: posenc.Learned(4, 8, init_std=-1), "init_std must not be negative"),
        (lambda: posenc.RoPE(8, interleaved=False, scaling=2.0), "scaling must be a method"),
        (lambda: posenc.DAPE("alibi", 4), "encoding must be a PositionEncoding"),
    ],
)
def test_invalid_arguments_are_refused(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_a_class_of_the_users_own_is_checked_too():
    class Mine(posenc.PositionEncoding):
        claims = posenc.Claims(source="an example")

        def __init__(self, strength: float, heads: int | None = None, note: str = "") -> None:
            super().__init__()

    Mine(1, None, "any")
    Mine(strength=0.5, heads=2)
    with pytest.raises(ValueError, match="Mine: strength must be a finite number, got nan"):
        Mine(math.nan)
    with pytest.raises(TypeError, match=r"Mine: heads must be a whole number, got 2\.0"):
        Mine(1, heads=2.0)
    with pytest.raises(TypeError, match=r"^Mine: strength is missing"):
        Mine()
