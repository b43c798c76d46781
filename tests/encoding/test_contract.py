"""Every registered encoding, held to the contract."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc import ModelShape, create, names
from posenc.registry import encoding_class
from tests.checks import CHECKS, modules, tracing
from tests.checks.numbers import precision

NAMES = names()


HARMLESS = {
    "every": "which layers of RNoPE rotate; layer 0, which is checked, always does",
    "num_positions": "CoPE counts open gates, fewer than its rows at the length that is checked",
    "init_std": "the start of parameters, which a checkpoint replaces",
}
"""Numeric options that may leave the result as it is, and why."""


def maker(name: str):
    return functools.partial(create, name)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str, check: str):
    CHECKS[check](maker(name))


@pytest.mark.parametrize("name", NAMES)
def test_no_option_is_ignored(name: str):
    modules.assert_no_option_is_ignored(maker(name), frozenset(HARMLESS))


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
        precision(maker(name), dtype, length, offset, shape)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_recompiling_per_length(name: str):
    tracing.assert_compiles_without_recompiling_per_length(maker(name))


@pytest.mark.parametrize("name", {encoding_class(name): name for name in reversed(NAMES)}.values())
def test_exports_with_any_length(name: str):
    """One entry of each class: the others differ in numbers."""
    tracing.assert_exports_with_any_length(maker(name))
