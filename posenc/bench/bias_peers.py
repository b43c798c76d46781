"""How other libraries compute attention with a positional bias: each as (q, k, v) -> output, with
our encoding's parameters and without projections."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from posenc.encoding.base import PositionEncoding

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_peers(name: str, encoding: PositionEncoding, n: int) -> dict[str, Attend]:
    """Peers of the encoding `name` that can be imported here, for n causal tokens."""
    found: dict[str, Attend] = {}
    if importlib.util.find_spec("x_transformers") is not None:
        if name == "alibi":
            found["x-transformers alibi, flash"] = _x_transformers_alibi(n)
        if name == "t5":
            found["x-transformers t5"] = _x_transformers_t5(encoding, n)
    if importlib.util.find_spec("transformers") is not None:
        if name == "t5":
            found["transformers T5Attention"] = _transformers_t5(encoding, n)
        if name == "deberta":
            found["transformers DeBERTa-v2"] = _transformers_deberta(encoding, n)
    return found


def _x_transformers_alibi(n: int) -> Attend:
    from x_transformers.attend import Attend as Module
    from x_transformers.x_transformers import AlibiPositionalBias

    bias, attend = AlibiPositionalBias(8, 8), Module(causal=True, heads=8, flash=True)
    return lambda q, k, v: attend(q, k, v, attn_bias=bias(n, n))[0]


def _x_transformers_t5(encoding: PositionEncoding, n: int) -> Attend:
    from x_transformers.attend import Attend as Module
    from x_transformers.x_transformers import RelativePositionBias

    bias = RelativePositionBias(1.0, causal=True, heads=8)
    bias.relative_attention_bias.weight = encoding.weight  # type: ignore[assignment]
    attend = Module(causal=True, heads=8, scale=1.0)
    return lambda q, k, v: attend(q, k, v, attn_bias=bias(n, n))[0]


class _Given(nn.Module):
    """Stands in for a projection and returns a given tensor, (1, n, heads * head_dim)."""

    def forward(self, _: Tensor) -> Tensor:
        return self.given

    def give(self, t: Tensor) -> None:
        self.given = t.transpose(1, 2).flatten(2)


def _attend_by(run: Callable[[Tensor], Tensor], given: Sequence[_Given]) -> Attend:
    """`run` an attention module whose projections give what they were given."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for projection, t in zip(given, (q, k, v), strict=True):
            projection.give(t)
        return run(given[0](q)).unflatten(-1, (8, 64)).transpose(1, 2)

    return attend


def _transformers_t5(encoding: PositionEncoding, n: int) -> Attend:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=512, d_kv=64, num_heads=8, is_decoder=True)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    module.relative_attention_bias.weight = encoding.weight  # type: ignore[assignment]
    given = module.q, module.k, module.v = _Given(), _Given(), _Given()  # type: ignore[assignment]
    module.o = nn.Identity()  # type: ignore[assignment]
    mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)
    return _attend_by(lambda x: module(x, mask=mask)[0], given)


def _transformers_deberta(encoding: PositionEncoding, n: int) -> Attend:
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=512, num_attention_heads=8, relative_attention=True,
        pos_att_type=["c2p", "p2c"], max_relative_positions=512,
    )  # fmt: skip
    module = DisentangledSelfAttention(config).eval()
    module.pos_key_proj = encoding.pos_key  # type: ignore[assignment]
    module.pos_query_proj = encoding.pos_query  # type: ignore[assignment]
    given = module.query_proj, module.key_proj, module.value_proj = _Given(), _Given(), _Given()  # type: ignore[assignment]
    mask = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
    return _attend_by(lambda x: module(x, mask, rel_embeddings=encoding.table)[0], given)
