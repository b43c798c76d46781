"""How other libraries rotate q and k: each as (q, k) -> (q, k), called the way its users do. Each
makes its tables in the call, or keeps them as it does by itself."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

THETA = 10_000.0

Pair = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Peer(NamedTuple):
    rotate: Pair
    interleaved: bool


def rotation_peers(n: int, head_dim: int, dtype: torch.dtype) -> dict[str, Peer]:
    """Peers that can be imported here, for positions 0..n-1, theta 10,000, tensors of
    (1, heads, n, head_dim)."""
    makers = {
        "transformers": ("transformers", _transformers, False),
        "Meta's complex product": ("torch", _complex, True),
        "rotary-embedding-torch (cos, sin per call)": (
            "rotary_embedding_torch", _rotary_embedding_torch, True,
        ),
        "x-transformers (cos, sin per call)": ("x_transformers", _x_transformers, True),
        "torchtune": ("torchtune", _torchtune, True),
    }  # fmt: skip
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peers still use of torch is not our user's concern
        for name, (module, make, interleaved) in makers.items():
            if importlib.util.find_spec(module) is None:
                continue
            try:
                found[name] = Peer(make(n, head_dim, dtype), interleaved)
            except ImportError:
                continue  # installed, but not for this torch
            except Exception as error:  # somebody else's code: whatever it raises
                print(
                    f"rope       {name}: cannot take head_dim {head_dim} "
                    f"({type(error).__name__}: {error}), so not timed",
                    file=sys.stderr,
                )
    return found


def angles(n: int, head_dim: int) -> Tensor:
    """The right angles in float64, (n, head_dim / 2)."""
    inv_freq = THETA ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(n, dtype=torch.float64), inv_freq)


def _transformers(n: int, head_dim: int, dtype: torch.dtype) -> Pair:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1)
    tables, positions = LlamaRotaryEmbedding(config), torch.arange(n)[None]
    return lambda q, k: apply_rotary_pos_emb(q, k, *tables(q, positions))


def _complex(n: int, head_dim: int, dtype: torch.dtype) -> Pair:
    """Meta's published form: to float32, one complex product, back."""

    def one(x: Tensor, turn: Tensor) -> Tensor:
        seen = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(seen * turn).flatten(-2).type_as(x)

    def pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.polar(torch.ones(()), angles(n, head_dim).float())
        return one(q, turn), one(k, turn)

    return pair


def _rotary_embedding_torch(n: int, head_dim: int, dtype: torch.dtype) -> Pair:
    from rotary_embedding_torch import RotaryEmbedding

    module = RotaryEmbedding(head_dim)
    return lambda q, k: (module.rotate_queries_or_keys(q), module.rotate_queries_or_keys(k))


def _x_transformers(n: int, head_dim: int, dtype: torch.dtype) -> Pair:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    module: Any = RotaryEmbedding(head_dim)

    def pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        freqs, scale = module.forward_from_seq_len(n)
        return apply_rotary_pos_emb(q, freqs, scale), apply_rotary_pos_emb(k, freqs, scale)

    return pair


def _torchtune(n: int, head_dim: int, dtype: torch.dtype) -> Pair:
    from torchtune.modules import RotaryPositionalEmbeddings

    module = RotaryPositionalEmbeddings(head_dim, max_seq_len=n)

    def one(x: Tensor) -> Tensor:
        return module(x.transpose(1, 2)).transpose(1, 2)

    return lambda q, k: (one(q), one(k))
