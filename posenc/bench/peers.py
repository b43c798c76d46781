"""How other libraries rotate q and k or attend with a bias, called the way their users do."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc.bench.cases import Case
from posenc.encodings.base.base import PositionEncoding

THETA = 10_000.0

Pair = Callable[[Tensor, Tensor], Sequence[Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rotation(NamedTuple):
    rotate: Pair
    interleaved: bool


def rotation_peers(case: Case, every: bool) -> dict[str, Rotation]:
    """Peers that can be imported here, for positions from 0 on: transformers, or `every` one. Each
    makes its tables in the call, or keeps them as it does by itself."""
    makers: dict[str, tuple[str, Callable[[Case], Pair], bool]] = {
        "transformers": ("transformers", _transformers_rotation, False),
        "Meta's complex product": ("torch", _complex, True),
        "rotary-embedding-torch": ("rotary_embedding_torch", _rotary_embedding_torch, True),
        "x-transformers": ("x_transformers", _x_transformers_rotation, True),
    }
    found = {}
    for name, (package, make, interleaved) in makers.items():
        if importlib.util.find_spec(package) is None or not (every or name == "transformers"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what peers still use of torch
                found[name] = Rotation(make(case), interleaved)
        except Exception as error:  # somebody else's code: whatever it raises
            leave_out(name, f"{type(error).__name__}: {error}")
    return found


def leave_out(name: str, why: str) -> None:
    """Say that a peer is not timed."""
    print(f"bench: {name} is left out: {why}", file=sys.stderr)


def _transformers_rotation(case: Case) -> Pair:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=case.head_dim, num_attention_heads=1)
    tables, positions = LlamaRotaryEmbedding(config), torch.arange(case.q_len)[None]
    return lambda q, k: apply_rotary_pos_emb(q, k, *tables(q, positions))


def _complex(case: Case) -> Pair:
    """Meta's published form: to float32, one complex product, back."""
    inv_freq = THETA ** -(torch.arange(0, case.head_dim, 2) / case.head_dim)

    def one(x: Tensor, turn: Tensor) -> Tensor:
        seen = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(seen * turn).flatten(-2).type_as(x)

    def pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.polar(torch.ones(()), torch.outer(torch.arange(case.q_len), inv_freq))
        return one(q, turn), one(k, turn)

    return pair


def _rotary_embedding_torch(case: Case) -> Pair:
    from rotary_embedding_torch import RotaryEmbedding

    module = RotaryEmbedding(case.head_dim)
    return lambda q, k: (module.rotate_queries_or_keys(q), module.rotate_queries_or_keys(k))


def _x_transformers_rotation(case: Case) -> Pair:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    module: Any = RotaryEmbedding(case.head_dim)

    def pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        freqs, scale = module.forward_from_seq_len(case.q_len)
        return apply_rotary_pos_emb(q, freqs, scale), apply_rotary_pos_emb(k, freqs, scale)

    return pair


def attention_peers(name: str, encoding: PositionEncoding, case: Case) -> dict[str, Attend]:
    """Peers of the encoding `name` that can be imported here, with its parameters and without
    projections."""
    makers: dict[str, list[tuple[str, str, Callable[[Any, Case], Attend]]]] = {
        "alibi": [("x-transformers ALiBi, flash", "x_transformers", _x_transformers_alibi)],
        "t5": [
            ("x-transformers T5", "x_transformers", _x_transformers_t5),
            ("transformers T5Attention", "transformers", _transformers_t5),
        ],
        "deberta": [("transformers DeBERTa-v2", "transformers", _transformers_deberta)],
    }
    return {
        peer: make(encoding, case)
        for peer, package, make in makers.get(name, ())
        if importlib.util.find_spec(package) is not None
    }


def _x_transformers_alibi(encoding: Any, case: Case) -> Attend:
    from x_transformers.attend import Attend as Module
    from x_transformers.x_transformers import AlibiPositionalBias

    bias = AlibiPositionalBias(case.heads, case.heads)
    attend = Module(causal=True, heads=case.heads, flash=True)
    return lambda q, k, v: attend(q, k, v, attn_bias=bias(case.q_len, case.q_len))[0]


def _x_transformers_t5(encoding: Any, case: Case) -> Attend:
    from x_transformers.attend import Attend as Module
    from x_transformers.x_transformers import RelativePositionBias

    bias = RelativePositionBias(1.0, causal=True, heads=case.heads)
    bias.relative_attention_bias.weight = encoding.weight
    attend = Module(causal=True, heads=case.heads, scale=1.0)
    return lambda q, k, v: attend(q, k, v, attn_bias=bias(case.q_len, case.q_len))[0]


class _Given(nn.Module):
    """Stands in for a projection and returns a given tensor, (batch, n, heads * head_dim)."""

    def forward(self, _: Tensor) -> Tensor:
        return self.given

    def give(self, t: Tensor) -> None:
        self.given = t.transpose(1, 2).flatten(2)


def _attend_by(run: Callable[[Tensor], Tensor], given: Sequence[_Given], case: Case) -> Attend:
    """`run` is an attention module whose projections return what they were given."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for projection, t in zip(given, (q, k, v), strict=True):
            projection.give(t)
        return run(given[0](q)).unflatten(-1, (case.heads, case.head_dim)).transpose(1, 2)

    return attend


def _transformers_t5(encoding: Any, case: Case) -> Attend:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=case.width, d_kv=case.head_dim, num_heads=case.heads, is_decoder=True)
    module: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    module.relative_attention_bias.weight = encoding.weight
    given = module.q, module.k, module.v = _Given(), _Given(), _Given()
    module.o = nn.Identity()
    hidden = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, case.q_len, case.q_len), hidden).triu(1)
    return _attend_by(lambda x: module(x, mask=mask)[0], given, case)


def _transformers_deberta(encoding: Any, case: Case) -> Attend:
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=case.width, num_attention_heads=case.heads, relative_attention=True,
        pos_att_type=["c2p", "p2c"], max_relative_positions=len(encoding.table) // 2,
    )  # fmt: skip
    module: Any = DisentangledSelfAttention(config).eval()
    module.pos_key_proj, module.pos_query_proj = encoding.pos_key, encoding.pos_query
    given = module.query_proj, module.key_proj, module.value_proj = _Given(), _Given(), _Given()
    mask = torch.ones(1, 1, case.q_len, case.q_len, dtype=torch.bool).tril()
    return _attend_by(lambda x: module(x, mask, rel_embeddings=encoding.table)[0], given, case)
