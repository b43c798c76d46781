"""DeBERTa: the authors' attention and buckets, the paper's form, shared tables and projections."""

import numpy as np
import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.scores.deberta import DeBERTa
from posenc.testing.harness import add_term_to_scores
from tests.attending import decoded
from tests.golden_values import Case, cases
from tests.references import deberta as paper


def build(case: Case) -> tuple[DeBERTa, posenc.Attention]:
    """The recorded layer: output without the projection that the authors keep elsewhere."""
    p, inputs = case.params, case.inputs
    terms = p["pos_att_type"].split("|")
    buckets = p["position_buckets"]
    encoding = DeBERTa(
        p["hidden"],
        p["heads"],
        head_dim=p["head_dim"],
        max_distance=p["max_relative_positions"],
        num_buckets=buckets if buckets > 0 else None,
        share_att_key=p["share_att_key"],
        c2p="c2p" in terms,
        p2c="p2c" in terms,
    )
    layer = posenc.Attention(p["hidden"], p["heads"], head_dim=p["head_dim"], bias=True)
    layer.encoding = encoding
    width = p["heads"] * p["head_dim"]
    state = {"encoding.table": inputs["rel_embeddings"]}
    state |= {"o_proj.weight": torch.eye(width), "o_proj.bias": torch.zeros(width)}
    names = {"query_proj": "q_proj", "key_proj": "k_proj", "value_proj": "v_proj"}
    names |= {"pos_key_proj": "encoding.pos_key", "pos_query_proj": "encoding.pos_query"}
    for theirs, ours in names.items():
        for kind in ("weight", "bias"):
            if f"{theirs}__{kind}" in inputs:
                state[f"{ours}.{kind}"] = inputs[f"{theirs}__{kind}"]
    layer.load_state_dict(state)
    if p["share_att_key"]:
        encoding.share_projections(layer.q_proj, layer.k_proj)
    return encoding, layer


@pytest.mark.golden("deberta")
@pytest.mark.parametrize("case", cases("deberta"))
def test_deberta_matches_the_authors_code(case: Case):
    encoding, layer = build(case)
    positions, x = case.inputs["positions"], case.inputs["hidden_states"]
    case.assert_close("relative_pos", encoding.bucket(positions[:, None] - positions))
    q, k = case.expected["q"][None], case.expected["k"][None]
    content = q @ k.mT * encoding.scale(q.shape[-1])
    added = add_term_to_scores(encoding, torch.zeros_like(content), q, k, positions, positions)
    case.assert_close("rel_att", added[0])
    logits = add_term_to_scores(encoding, content, q, k, positions, positions)[0]
    case.assert_close("logits_minus_max", logits - logits.amax(-1, keepdim=True))
    keep = case.inputs["attention_mask"].bool()
    mask = masks.Mask(lambda pairs: keep[pairs.q_idx, pairs.kv_idx])
    case.assert_close("output", layer(x[None], positions, mask=mask)[0])


@pytest.mark.parametrize("case", cases("deberta_log_bucket"))
def test_deberta_log_buckets_match_the_authors_code(case: Case):
    p = case.params
    encoding = DeBERTa(8, 2, num_buckets=p["bucket_size"], max_distance=p["max_position"])
    case.assert_close("bucket", encoding.bucket(case.inputs["relative_position"]))


@pytest.mark.parametrize("num_buckets", [None, 8])
@pytest.mark.parametrize("paper_p2c", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_deberta_matches_the_paper(num_buckets, paper_p2c: bool, scattered: bool):
    torch.manual_seed(0)
    encoding = DeBERTa(8, 2, max_distance=12, num_buckets=num_buckets, paper_p2c=paper_p2c).double()
    encoding.table.data = torch.randn_like(encoding.table)
    positions = torch.randperm(40)[:9] if scattered else torch.arange(9)
    q, k = (torch.randn(1, 2, 9, 4).double() for _ in range(2))
    content = q @ k.mT * encoding.scale(4)
    got = add_term_to_scores(encoding, content, q, k, positions, positions)[0]

    def table(projection):
        rows = encoding.table @ projection.weight.T + projection.bias
        return rows.unflatten(-1, (2, 4)).transpose(0, 1).detach().numpy()

    want = paper.logits(
        q[0].numpy(),
        k[0].numpy(),
        table(encoding.pos_key),
        table(encoding.pos_query),
        positions.numpy(),
        num_buckets,
        12,
        paper_p2c,
    )
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-12, atol=1e-12)


def test_deberta_table_is_normalised_where_asked():
    torch.manual_seed(0)
    plain, normed = DeBERTa(8, 2, max_distance=4), DeBERTa(8, 2, max_distance=4, layer_norm=True)
    normed.load_state_dict(plain.state_dict(), strict=False)
    plain.table.data = torch.nn.functional.layer_norm(plain.table.data, (8,), eps=1e-7)
    q, p = torch.randn(1, 2, 5, 4), torch.arange(5)
    zeros = torch.zeros(1, 2, 5, 5)
    torch.testing.assert_close(
        add_term_to_scores(normed, zeros, q, q, p, p), add_term_to_scores(plain, zeros, q, q, p, p)
    )


def test_deberta_shares_grouped_projections_without_owning_them():
    layer = posenc.Attention(8, 4, 2, encoding=DeBERTa(8, 4, 2, share_att_key=True))
    x, positions = torch.randn(1, 5, 8), torch.arange(5)
    with pytest.raises(ValueError, match="share_projections"):
        layer(x, positions)
    layer.encoding.share_projections(layer.q_proj, layer.k_proj)
    assert layer(x, positions).shape == x.shape
    assert not any("proj" in name for name, _ in layer.encoding.named_parameters())


def test_deberta_decodes_with_a_cache_as_it_prefills():
    torch.manual_seed(0)
    layer = posenc.Attention(8, 4, 2, encoding=DeBERTa(8, 4, 2, max_distance=3)).double()
    layer.encoding.table.data = torch.randn_like(layer.encoding.table)
    x, positions = torch.randn(2, 6, 8).double(), torch.arange(6)
    whole = layer(x, positions, mask=masks.causal)
    torch.testing.assert_close(decoded(layer, x), whole)


def test_deberta_counts_its_parameters():
    table, projection = 10 * 8, 8 * 8 + 8
    for options, count in (
        ({}, table + 2 * projection),
        ({"layer_norm": True}, table + 2 * 8 + 2 * projection),
        ({"p2c": False}, table + projection),
        ({"share_att_key": True}, table),
    ):
        assert DeBERTa(8, 2, max_distance=5, **options).num_parameters == count


def test_deberta_refuses_buckets_that_cannot_be_laid_out():
    with pytest.raises(ValueError, match="num_buckets=256, max_distance=128"):
        DeBERTa(8, 2, num_buckets=256, max_distance=128)
    with pytest.raises(ValueError, match="at least one of c2p and p2c"):
        DeBERTa(8, 2, c2p=False, p2c=False)


@pytest.mark.parametrize("mask", [None, masks.causal], ids=["both-sides", "causal"])
@pytest.mark.parametrize("p2c", [False, True])
def test_blocks_read_what_lies_beyond_the_furthest_distance_on_either_side(mask, p2c):
    torch.manual_seed(0)
    encoding = posenc.DeBERTa(16, 2, max_distance=8, p2c=p2c).double()
    torch.nn.init.normal_(encoding.table)
    q, k, v = (torch.randn(1, 2, 700, 8, dtype=torch.float64) for _ in range(3))
    where = {"q_positions": torch.arange(700), "kv_positions": torch.arange(700), "mask": mask}
    with torch.no_grad():
        blocks = posenc.attention(q, k, v, encoding, impl="blocks", **where)
        whole = posenc.attention(q, k, v, encoding, impl="reference", **where)
    torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(256, 512), (8, 16), (32, 128)])
def test_far_keys_ahead_read_the_row_of_either_source(num_buckets, max_distance):
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distance = torch.arange(-3 * max_distance, 3 * max_distance)
    bucket = theirs.make_log_bucket_position(distance, num_buckets, max_distance).long()
    wanted = (bucket + num_buckets).clamp(0, 2 * num_buckets - 1)
    sizes = {"num_buckets": num_buckets, "max_distance": max_distance}
    apart = posenc.DeBERTa(8, 2, **sizes, clamp=False).table_row(distance) != wanted
    # Their logarithm in float32 may round an edge up; no row is off by more than one.
    assert apart.sum() <= 2 and not apart[distance <= -max_distance].any()
    clamped = posenc.DeBERTa(8, 2, **sizes).table_row(distance)
    assert (clamped[distance <= -max_distance] == 1).all()
    assert (wanted[distance <= -max_distance] == 0).all()
