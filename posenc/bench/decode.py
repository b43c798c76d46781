"""What a cache of keys and values costs and saves: its bytes, and tokens per second with and
without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posenc import masks
from posenc.attend.multihead import Attention
from posenc.bench import measure
from posenc.encoding.shape import ModelShape
from posenc.registry import create

EMBED, HEADS, HEAD_DIM, STEPS = 512, 8, 64, 8
KINDS = {"multi-head": 8, "grouped-query": 2, "multi-query": 1}
FLOOR = "without cache"


def measure_decoding(
    lengths: Sequence[int], repeats: int, names: Sequence[str] = ("rope", "rerope")
) -> list[dict[str, Any]]:
    """Rows for one layer of 8 heads of 64 that writes 8 tokens after n; `rope` caches rotated keys,
    `rerope` raw ones, which are rotated at every step."""
    found = []
    for n in lengths:
        for name in names:
            for kind, kv_heads in KINDS.items():
                found += _one(n, name, kind, kv_heads, repeats)
    return found


@torch.no_grad()
def _one(n: int, name: str, kind: str, kv_heads: int, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = ModelShape(EMBED, HEADS, kv_heads, HEAD_DIM, train_length=n)
    layer = Attention(EMBED, HEADS, kv_heads, create(name, shape)).eval()
    x = torch.randn(1, n + STEPS, EMBED)
    positions = torch.arange(n + STEPS)
    from posenc.attend.cache import KVCache

    full = KVCache()
    layer(x[:, :n], positions[:n], cache=full, mask=masks.causal)
    k, v, stored, state = full.k, full.v, full.positions, full.state
    assert stored is not None

    def with_cache() -> torch.Tensor:
        cache = KVCache()
        cache.append(k, v, stored, state)
        outs = [
            layer(x[:, i : i + 1], positions[i : i + 1], cache=cache, mask=masks.causal)
            for i in range(n, n + STEPS)
        ]
        return torch.cat(outs, 1)

    def without() -> torch.Tensor:
        outs = [
            layer(x[:, : i + 1], positions[: i + 1], mask=masks.causal)[:, -1:]
            for i in range(n, n + STEPS)
        ]
        return torch.cat(outs, 1)

    # The same sums in another order.
    torch.testing.assert_close(with_cache(), without(), rtol=1e-4, atol=1e-5)
    seconds = measure.interleaved({FLOOR: without, "with cache": with_cache}, repeats)
    rows = measure.timing_rows(
        "decode", {"n": n, "encoding": name, "kind": kind}, seconds, FLOOR, {}
    )
    for row in rows:
        p50 = float(row["p50_ms"]) / 1e3
        row["tokens_per_second"] = f"{STEPS / p50:.1f}"
        row["cache_bytes"] = full.nbytes if row["case"] == "with cache" else 0
        row["keys"] = "raw" if layer.encoding.claims.needs_raw_k else "rotated"
    measure.show_rows(rows)
    return rows
