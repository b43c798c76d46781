"""The example of Selective RoPE: its authors' numbers, and the contract but for one check."""

from pathlib import Path
from typing import Any

import pytest
import torch

import posenc
from posenc.encodings import ModelShape
from posenc.encodings.base.term import Tokens
from posenc.testing import CHECKS
from tests.golden_values import Case, cases

PATH = Path(__file__).parents[3] / "docs" / "examples" / "selective_rope.py"
SelectiveRoPE: Any = type(posenc.create(f"{PATH}:SelectiveRoPE", ModelShape(32, 4)))


def built(case: Case) -> Any:
    encoding = SelectiveRoPE(**case.params)
    weights = {f"{name}.weight": case.inputs[name] for name in ("down", "up")}
    encoding.load_state_dict(weights | {"taps": case.inputs["taps"]})
    return encoding


def rotated(encoding, q, k, state, at):
    return encoding.transform(*(Tokens(x, at, state=state) for x in (q, k)))


@pytest.mark.parametrize("case", cases("selective_rope"))
def test_queries_and_keys_are_those_of_the_authors_code(case: Case):
    encoding, q, k = built(case), case.inputs["q"], case.inputs["k"]
    positions = torch.arange(q.shape[2])
    state = encoding.state(case.inputs["x"], positions)
    for name, got in zip("qk", rotated(encoding, q, k, state, positions), strict=True):
        case.assert_close(name, got)


@pytest.mark.parametrize("case", cases("selective_rope"))
def test_the_convolution_does_not_reach_into_another_document(case: Case):
    encoding, x = built(case), case.inputs["x"]
    packed = encoding.state(x, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]))
    alone = encoding.state(x[:, 5:], torch.arange(4))
    pairs = encoding.head_dim // 2
    torch.testing.assert_close(packed[..., 5:, pairs:], alone[..., pairs:])
    steps = packed[..., :pairs].diff(dim=2)[:, :, 5:]
    torch.testing.assert_close(steps, alone[..., :pairs].diff(dim=2))
    joined = encoding.state(x, torch.arange(9))[..., :pairs].diff(dim=2)[:, :, 5:]
    assert not torch.allclose(steps, joined)


def test_sizes_that_do_not_fit_are_refused():
    for sizes in ((16, 2, 7), (16, 3, 8)):
        with pytest.raises(ValueError, match="head_dim must be even and embed_dim a multiple"):
            SelectiveRoPE(*sizes)


def make(shape: ModelShape) -> Any:
    return SelectiveRoPE.from_shape(shape)


@pytest.mark.parametrize("check", [c for c in CHECKS if c != "blind_rows_give_zeros"])
def test_it_keeps_the_contract(check: str):
    CHECKS[check](make)


def test_it_reaches_tokens_that_only_a_mask_hides_and_so_is_not_in_the_registry():
    with pytest.raises(AssertionError, match="tokens that see none and are not seen"):
        CHECKS["blind_rows_give_zeros"](make)
