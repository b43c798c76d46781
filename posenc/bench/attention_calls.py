"""Build calls of attention, of an attention layer, and of rotation, to be timed."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc import masks
from posenc.attend.attention import attention
from posenc.attend.attention_layer import Attention
from posenc.bench.cases import Case
from posenc.bench.measure import Call, peak_bytes
from posenc.encodings import ModelShape, PositionEncoding, RoPE, create, encoding_of_all_layers

RotationFunction = Callable[[Tensor, Tensor], Sequence[Tensor]]
NUM_CHECKED_ROWS = 64
"""Queries, the last ones, that are compared with the reference before a call is timed: chosen."""


def attention_calls(case: Case) -> dict[str, Call]:
    """Return calls of causal SDPA without positions and of causal attention with each encoding.
    Raise AssertionError if the last rows of an encoding differ from the reference."""
    inputs = _random_q_k_v(case)
    grad = torch.randn_like(inputs[0])
    runs: dict[str, Callable[..., Any]] = {"SDPA": _sdpa_function(case)}
    weights: dict[str, list[Tensor]] = {}
    for run in case.runs:
        name, _, how = run.partition(", ")
        encoding = _build_encoding(name, case)
        runs[run] = _attention_function(case, encoding, how)
        weights[run] = [w for w in encoding.parameters() if w.requires_grad]
        with torch.no_grad():
            # Only a few rows: the reference holds all scores of its rows at once.
            last_rows = slice(-min(NUM_CHECKED_ROWS, case.q_len), None)
            q, k, v = inputs
            got = runs[run](q, k, v)
            want = _attention_function(case, encoding, "reference", last_rows)(q, k, v)
            exact = case.dtype == "float32"  # differs only by the order of sums; bounds are chosen
            torch.testing.assert_close(
                got[:, :, last_rows],
                want,
                rtol=1e-3 if exact else 0.1,
                atol=1e-4 if exact else 0.05,
            )
    return {
        run: _timed_call(attend, inputs, weights.get(run, []), (grad,), case.backward)
        for run, attend in runs.items()
    }


def attention_memory(case: Case) -> dict[str, int]:
    """Return, by the name of each run, the peak bytes of its attention call beyond inputs, output
    and gradients."""
    inputs = _random_q_k_v(case)
    # The output has the size of q; the inputs were there before. A gradient has its input's size.
    output_and_gradients = inputs[0].nbytes
    if case.backward:
        output_and_gradients += sum(t.nbytes for t in inputs)
    peaks = {}
    for run, call in attention_calls(case).items():
        call()  # what is built and cached by the first call is not counted
        weight_gradients = 0
        if case.backward and run in case.runs:
            weights = _build_encoding(run.partition(", ")[0], case).parameters()
            weight_gradients = sum(w.nbytes for w in weights if w.requires_grad)
        peaks[run] = max(0, peak_bytes(call) - output_and_gradients - weight_gradients)
    return peaks


def layer_calls(case: Case) -> dict[str, Call]:
    """Return calls of posenc.Attention with each encoding, and of a layer without positions."""
    x = torch.randn(case.batch, case.q_len, case.width)
    head_counts = (case.heads, case.kv_heads, case.kv_heads)
    q_k_v = [nn.Linear(case.width, heads * case.head_dim, bias=False) for heads in head_counts]
    out = nn.Linear(case.width, case.width, bias=False)
    attend = _sdpa_function(case)

    def call_without_positions() -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, case.head_dim)).transpose(1, 2) for project in q_k_v
        )
        return out(attend(q, k, v).transpose(1, 2).flatten(-2))

    def call_with_encoding(name: str) -> Call:
        layer = Attention(
            case.width, case.heads, case.kv_heads, encoding=_build_encoding(name, case)
        )
        return lambda: layer(x, range(case.q_len), mask=masks.causal)

    calls = {"plain layer": call_without_positions}
    calls |= {name: call_with_encoding(name) for name in case.runs}
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def rotation_calls(case: Case) -> dict[str, Call]:
    """Return calls that copy q and k, rotate them by RoPE in both layouts, and by transformers if
    it is installed. A run computes cos and sin in each call unless it is named "same positions"."""
    # Transposed, so that they lie in memory as after projections.
    q, k = (
        _random_tensor(case, case.batch, case.q_len, heads, case.head_dim).transpose(1, 2)
        for heads in (case.heads, case.kv_heads)
    )
    runs: dict[str, RotationFunction] = {"clone": lambda q, k: (q.clone(), k.clone())}
    for run in case.runs:
        layout, _, same_positions = run.partition(", ")
        runs[run] = _rotation_function(case, layout == "interleaved", bool(same_positions))
    if not case.device and importlib.util.find_spec("transformers") is not None:
        theirs = _transformers_rotation(case)
        ours = _rotation_function(case, False, True)
        largest_error = (theirs(q, k)[0].float() - ours(q, k)[0].float()).abs().max().item()
        # Its float32 angles are off by 1e-3 at 16k, and it rounds every product to bfloat16.
        if largest_error < (2e-2 if case.dtype == "float32" else 0.15):
            runs["transformers"] = theirs
        else:
            print(f"bench: transformers is left out: off by {largest_error:.2g}", file=sys.stderr)
    # q and k also serve as gradients of the results, which have their shapes.
    return {
        run: _timed_call(rotate, (q, k), [], (q, k), case.backward) for run, rotate in runs.items()
    }


def _rotation_function(case: Case, interleaved: bool, same_positions: bool) -> RotationFunction:
    """Return a function that rotates q and k by RoPE.

    interleaved: the layout, half-split if False.
    same_positions: every call has the same positions, whose cos and sin are then computed once; if
        False, each call begins one position later than the one before.
    """
    rope = RoPE(case.head_dim, interleaved=interleaved)
    starts = itertools.count(step=0 if same_positions else 1)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        start = next(starts)
        return rope(q, k, range(start, start + case.q_len))

    return rotate


def _transformers_rotation(case: Case) -> RotationFunction:
    """Return transformers' Llama rotation, which computes cos and sin in each call."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=case.head_dim, num_attention_heads=1)
    tables = LlamaRotaryEmbedding(config)
    positions = torch.arange(case.q_len)[None]
    return lambda q, k: apply_rotary_pos_emb(q, k, *tables(q, positions))


def _attention_function(
    case: Case, encoding: PositionEncoding, variant: str, queries: slice | None = None
) -> Callable[..., Any]:
    """Return a function of q, k and v, each (batch, heads, len, head_dim): causal attention of the
    last q_len tokens to all.

    variant: "prepared" for an encoding that was prepared before the calls, the name of an
        implementation, or "" for the one that posenc chooses.
    queries: which tokens of q attend, as a slice; None for all.
    """
    positions = range(case.num_keys)
    torch.manual_seed(0)  # the reference gets the same state
    state = encoding.state(
        torch.randn(case.batch, case.num_keys, case.width), torch.arange(case.num_keys)
    )
    state = None if state is None else state.detach()
    rows_of_q = slice(None) if queries is None else queries
    tokens_of_q = slice(case.num_keys - case.q_len, None) if queries is None else queries
    prepared = encoding.prepare(positions) if variant == "prepared" else None
    q_state = None if state is None else state[:, :, tokens_of_q]
    options: dict[str, Any] = {"q_state": q_state, "kv_state": state, "mask": masks.causal}
    options |= {
        "q_positions": positions[tokens_of_q],
        "kv_positions": positions,
        "prepared": prepared,
    }
    impl = "auto" if variant in ("", "prepared") else variant
    return lambda q, k, v: attention(q[:, :, rows_of_q], k, v, encoding, impl=impl, **options)


def _sdpa_function(case: Case) -> Callable[..., Tensor]:
    """Return torch's own attention, causal if there are no keys of earlier tokens."""
    is_causal = case.q_len == case.num_keys
    shares_keys = case.heads != case.kv_heads
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=shares_keys
    )


def _timed_call(
    run: Callable[..., Any],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    backward: bool,
) -> Call:
    """Return a call of `run` on these inputs. With `backward` it also computes the gradients of
    inputs and weights, and drops them."""
    if not backward:
        return torch.no_grad()(lambda: run(*inputs))

    def call() -> None:
        # Detached anew, so that no call sees the graph of another.
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = run(*leaves)
        outs = [out] if isinstance(out, Tensor) else list(out)
        # allow_unused: not every weight of an encoding takes part in every call.
        torch.autograd.grad(outs, [*leaves, *weights], grads, allow_unused=True)

    return call


def _build_encoding(name: str, case: Case) -> PositionEncoding:
    """Return the encoding of this name for layer 0 of a model with one layer in the sizes of the
    case."""
    torch.manual_seed(0)
    shape = ModelShape(case.width, case.heads, case.kv_heads, case.head_dim, case.num_keys)
    one_layer = encoding_of_all_layers(create(name, shape), num_layers=1)
    return one_layer.for_layer(0).to(case.device or "cpu")


def _random_q_k_v(case: Case) -> tuple[Tensor, ...]:
    """Return random q, k and v, (batch, heads, len, head_dim), the same in every call."""
    sizes = (
        (case.heads, case.q_len),
        (case.kv_heads, case.num_keys),
        (case.kv_heads, case.num_keys),
    )
    torch.manual_seed(0)
    return tuple(_random_tensor(case, case.batch, *size, case.head_dim) for size in sizes)


def _random_tensor(case: Case, *shape: int) -> Tensor:
    """Return normal random numbers in the dtype and on the device of the case."""
    return torch.randn(shape).to(case.device or "cpu", getattr(torch, case.dtype))
