"""Every registered encoding, held to the contract."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc import ModelShape, names
from posenc.testing import CHECKS, maker
from posenc.testing.contract import (
    assert_compiles_without_recompiling_per_length,
    assert_exports_with_any_length,
    every_check,
)
from posenc.testing.numerics import check_precision
from tests.compilers import needs_whole_graphs
from tests.kinds import one_of_each_kind

NAMES = names()


@pytest.mark.quick(75)  # every encoding and every check, though not together
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str, check: str):
    CHECKS[check](maker(name))


@pytest.mark.parametrize("name", NAMES)
def test_no_option_is_ignored(name: str):
    every_check()["no_option_is_ignored"](maker(name))


@pytest.mark.parametrize("name", NAMES)
def test_any_shape_and_dtype(name: str):
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(
        length=st.integers(1, 41),
        offset=st.integers(0, 3000),
        kv_heads=st.sampled_from([1, 2, 3, 5]),
        group=st.sampled_from([1, 2, 3]),
        head_dim=st.sampled_from([8, 12, 24]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        causal=st.booleans(),
    )
    def check(length, offset, kv_heads, group, head_dim, dtype, causal):
        shape = ModelShape(
            embed_dim=kv_heads * group * head_dim,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            train_length=24,
            causal=causal,
        )
        check_precision(maker(name), dtype, length, offset, shape)

    check()


@pytest.mark.quick(1)
@needs_whole_graphs
@pytest.mark.parametrize("name", one_of_each_kind(0, 2))
def test_compiles_without_recompiling_per_length(name: str):
    assert_compiles_without_recompiling_per_length(maker(name))


@pytest.mark.quick(1)
@needs_whole_graphs
@pytest.mark.parametrize("name", one_of_each_kind(1, 2))
def test_exports_with_any_length(name: str):
    assert_exports_with_any_length(maker(name), strict=True)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", one_of_each_kind(0, 2))
def test_exports_what_its_python_code_does_for_any_length(name: str):
    if name in ("rnope_swa", "irope"):
        pytest.skip("strict=False of torch knows no copy of a module that two layers share")
    assert_exports_with_any_length(maker(name), strict=False)
