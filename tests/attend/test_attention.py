"""The attention module: shared projections, cross-attention, memory; held to plain formulas."""

import pytest
import torch

import posenc
from posenc import masks

GENERATOR = torch.Generator()


def layer(projections="separate", kv_heads=4, **options) -> posenc.Attention:
    torch.manual_seed(0)
    return posenc.Attention(16, 4, kv_heads, projections=projections, **options).double()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed), dtype=torch.float64)


def softmax_attention(q, k, v):
    """Return softmax attention of q, k, v (batch, len, 16) with four heads of 4 channels, computed
    head by head."""
    heads = []
    for h in range(4):
        part = slice(4 * h, 4 * h + 4)
        weights = (q[..., part] @ k[..., part].mT / 2).softmax(-1)
        heads.append(weights @ v[..., part])
    return torch.cat(heads, dim=-1)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("projections", ["separate", "k=v", "q=k", "none"])
def test_shared_projections_compute_what_their_name_says(projections, cross):
    module = layer(projections, bias=True)
    x = random(2, 5, 16)
    source = random(2, 7, 16, seed=2) if cross else x
    q = x if projections == "none" else module.q_proj(x)
    k, v = {
        "separate": lambda: (module.k_proj(source), module.v_proj(source)),
        "k=v": lambda: (module.k_proj(source), module.k_proj(source)),
        "q=k": lambda: (module.q_proj(source), module.v_proj(source)),
        "none": lambda: (source, source),
    }[projections]()
    expected = module.o_proj(softmax_attention(q, k, v))
    context = {"context": source, "context_positions": torch.arange(7)} if cross else {}
    out = module(x, torch.arange(5), **context)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_shared_projections_have_fewer_parameters():
    sizes = {
        kind: sum(p.numel() for p in layer(kind).parameters())
        for kind in ("separate", "k=v", "q=k", "none")
    }
    assert sizes == {"separate": 4 * 256, "k=v": 3 * 256, "q=k": 3 * 256, "none": 256}
    multi_query = sum(p.numel() for p in layer(kv_heads=1).parameters())
    assert multi_query == 2 * 256 + 2 * 64


def test_grouped_queries_equal_repeated_key_heads():
    grouped, full = layer(kv_heads=2), layer()
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            weight = getattr(grouped, name).weight.view(2, 4, 16).repeat_interleave(2, dim=0)
            getattr(full, name).weight.copy_(weight.reshape(16, 16))
        full.q_proj.weight.copy_(grouped.q_proj.weight)
        full.o_proj.weight.copy_(grouped.o_proj.weight)
    x, p = random(2, 5, 16), torch.arange(5)
    torch.testing.assert_close(grouped(x, p), full(x, p), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "shaw", "transformer_xl"])
@torch.no_grad()
def test_memory_equals_the_end_of_the_whole_sequence(name):
    module = layer(kv_heads=2)
    encoding = posenc.create(name, posenc.ModelShape(16, 4, 2)).double()
    x, p = random(2, 9, 16), torch.arange(9)
    whole = module(x, p, mask=masks.causal, encoding=encoding)
    end = module(
        x[:, 5:],
        p[5:],
        memory=x[:, :5],
        memory_positions=p[:5],
        mask=masks.causal,
        encoding=encoding,
    )
    torch.testing.assert_close(end, whole[:, 5:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fox", "rope+fox", "cope"])
def test_an_encoding_that_reads_the_order_in_memory_is_refused_across_sequences(name):
    encoding = posenc.create(name, posenc.ModelShape(16, 4, 2, causal=False)).double()
    x = random(1, 3, 16)
    at = {"context": random(1, 5, 16), "context_positions": range(5)}
    with pytest.raises(ValueError, match="stand in two sequences"):
        layer(kv_heads=2)(x, range(3), **at, encoding=encoding)


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "shaw", "deberta"])
@torch.no_grad()
def test_a_cached_context_is_projected_once_and_read_again(name):
    module = layer(kv_heads=2)
    encoding = posenc.create(name, posenc.ModelShape(16, 4, 2, causal=False)).double()
    x, p = random(2, 4, 16), torch.arange(4)
    context, context_positions = random(2, 7, 16, seed=2), torch.arange(7)
    whole = module(x, p, context=context, context_positions=context_positions, encoding=encoding)
    cache = posenc.KVCache()
    steps = [
        module(
            x[:, i : i + 1],
            p[i : i + 1],
            context=context,
            cache=cache,
            context_positions=context_positions,
            encoding=encoding,
        )
        for i in range(4)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-12)
    assert cache.length == 7


def test_projections_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"one of separate, k=v, q=k, none, got 'v=k'"):
        layer("v=k")
    with pytest.raises(ValueError, match=r"equal numbers of .* heads, got 2 and 4"):
        layer("q=k", kv_heads=2)
    with pytest.raises(ValueError, match=r"got 4 \* 8 and 16"):
        layer("none", head_dim=8)
    with pytest.raises(ValueError, match="context needs context_positions"):
        layer()(random(1, 2, 16), torch.arange(2), context=random(1, 3, 16))
    with pytest.raises(ValueError, match="embed_dim=16, num_heads=3, num_kv_heads=3"):
        posenc.Attention(16, 3)
