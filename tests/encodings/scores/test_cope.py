"""CoPE: the authors' attention in its variants, x-transformers' term, the paper, and its claims."""

import numpy as np
import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.scores.cope import CoPE
from posenc.testing.harness import add_term_to_scores
from tests.attending import attend, decoded
from tests.golden_values import Case, cases
from tests.references import cope as paper


def filled(**options) -> CoPE:
    torch.manual_seed(0)
    encoding = CoPE(4, **options).double()
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter)
    return encoding


@pytest.mark.golden("cope")
@pytest.mark.parametrize("case", cases("cope"))
def test_cope_matches_the_authors_code(case: Case):
    p, inputs = case.params, case.inputs
    gates = "value" if p["val_gates"] else "separate_key" if p["sep_key"] else "key"
    encoding = CoPE(
        p["head_dim"], 8, 1, num_positions=p["npos"], scale_term=not p["nodiv"], gates=gates
    ).double()
    encoding.e.data = inputs["pos_emb"][0].T
    q, k, v = (inputs[name][:, None] for name in ("q", "k", "v"))
    state = {"key": None, "value": v}.get(gates) if gates != "separate_key" else None
    if gates == "separate_key":
        state = inputs["key_cope"][:, None]
    seen = inputs["attn_mask"].bool()
    mask = masks.Mask(lambda pairs: seen[pairs.q_idx, pairs.kv_idx])
    positions = torch.arange(q.shape[2])
    out = attend(q, k, v, encoding, positions, mask=mask, kv_state=state)
    case.assert_close("output", out[:, 0])
    scores = q @ k.mT * encoding.scale(p["head_dim"])
    with_term = add_term_to_scores(
        encoding, scores, q, None, positions, positions, None, state, mask=seen[None, None]
    )
    case.assert_close("logits", with_term.masked_fill(~seen, -torch.inf)[:, 0])


@pytest.mark.parametrize("case", cases("cope_xtransformers"))
def test_undivided_cope_matches_x_transformers(case: Case):
    encoding = CoPE(case.params["head_dim"], num_positions=case.params["max_pos"], scale_term=False)
    encoding.e.data = case.inputs["pos_emb"]
    positions = torch.arange(case.inputs["q"].shape[2])
    scores = case.inputs["attn_logits"]
    q, scores = case.inputs["q"].double(), scores.double()
    with_term = add_term_to_scores(encoding.double(), scores, q, None, positions, positions)
    shown = scores > -1e6  # a hidden key carries the lowest float, in which a term is lost
    case.assert_close("cope_term", with_term - scores, where=shown)


@pytest.mark.parametrize("scale_term", [True, False])
def test_cope_matches_the_paper(scale_term: bool):
    encoding = filled(num_positions=4, scale_term=scale_term)
    q, k = torch.randn(1, 1, 9, 4).double(), torch.randn(1, 1, 9, 4).double()
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    visible[5, 2] = False
    positions = torch.arange(9)
    scores = q @ k.mT / 2
    with_term = add_term_to_scores(
        encoding, scores, q, None, positions, positions, mask=visible[None, None]
    )
    got = (with_term - scores)[0, 0].detach().numpy()
    want = paper.term(
        q[0, 0].numpy(), k[0, 0].numpy(), encoding.e.detach().numpy(), visible.numpy(), scale_term
    )
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gates", ["key", "separate_key"])
def test_cope_decodes_with_a_cache_as_it_prefills(gates: str):
    encoding = filled(embed_dim=8, num_kv_heads=1, gates=gates, num_positions=5)
    layer = posenc.Attention(8, 2, 1, encoding=encoding).double()
    x, positions = torch.randn(2, 7, 8).double(), torch.arange(7)
    whole = layer(x, positions, mask=masks.causal)
    torch.testing.assert_close(decoded(layer, x), whole)


def test_cope_counts_visible_keys_alone():
    encoding = filled(num_positions=6)
    q, k, v = (torch.randn(1, 2, 5, 4).double() for _ in range(3))
    p = torch.arange(5)
    alone = posenc.attention(q, k, v, encoding, q_positions=p, kv_positions=p, mask=masks.causal)

    def padded(t, before, after):
        pad = torch.full((1, 2, before, 4), 3.0).double(), torch.full((1, 2, after, 4), -2.0)
        return torch.cat([pad[0], t, pad[1].double()], dim=2)

    positions = torch.arange(-2, 7)
    valid = ((positions >= 0) & (positions < 5))[None]
    out = posenc.attention(
        padded(q, 2, 2),
        padded(k, 2, 2),
        padded(v, 2, 2),
        encoding,
        q_positions=positions,
        kv_positions=positions,
        mask=masks.causal & masks.padding(valid),
    )
    torch.testing.assert_close(out[:, :, 2:7], alone)


def test_cope_reads_the_order_of_keys_and_not_their_positions():
    encoding = filled(num_positions=6)
    q, k, v = (torch.randn(1, 1, 5, 4).double() for _ in range(3))
    p, order = torch.arange(5), torch.tensor([1, 0, 2, 3, 4])

    def run(k, v, kv_positions):
        return posenc.attention(q, k, v, encoding, q_positions=p + 9, kv_positions=kv_positions)

    torch.testing.assert_close(run(k, v, p), run(k, v, p.flip(0)))
    assert (run(k, v, p) - run(k[:, :, order], v[:, :, order], p[order])).abs().max() > 1e-3


def test_cope_gradients():
    encoding = filled(num_positions=3)
    p = torch.arange(4)

    def run(q, k, v, e):
        encoding._parameters["e"] = e
        return attend(q, k, v, encoding, p, impl="reference")

    inputs = [torch.randn(1, 1, 4, 4).double().requires_grad_() for _ in range(3)]
    e = encoding.e.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, [*inputs, e], fast_mode=True)


def test_cope_counts_its_parameters_and_says_what_it_needs():
    assert CoPE(4).num_parameters == 64 * 4
    assert CoPE(4, 8, 2, gates="separate_key").num_parameters == 64 * 4 + 8 * 8
    with pytest.raises(ValueError, match="num_positions must be at least 2, got 1"):
        CoPE(4, num_positions=1)
    with pytest.raises(ValueError, match="key, value or separate_key, got 'both'"):
        CoPE(4, gates="both")  # type: ignore[arg-type]
    q, p = torch.randn(1, 1, 3, 4), torch.arange(3)
    with pytest.raises(ValueError, match="gates='value' needs kv_state=v"):
        posenc.attention(q, q, q, CoPE(4, gates="value"), q_positions=p, kv_positions=p)


@pytest.mark.parametrize("rows", [8, 150])
@pytest.mark.parametrize("openness", [-3.0, 0.0, 3.0])
def test_counting_in_parts_changes_nothing(openness: float, rows: int):
    """Where gates are open the count stops early; where they are shut it goes to the first key.
    Queries 64 to 127 see no key at all."""
    torch.manual_seed(0)
    encoding = posenc.CoPE(8, num_positions=40).double()
    encoding.e.data = torch.randn_like(encoding.e)
    length = 400
    positions = torch.arange(length)
    q = torch.randn(1, 2, rows, 8).double()
    scores = (torch.randn(1, 2, rows, length) + openness).double()
    scores[:, :, ::5] -= 6  # some queries count further than others
    scores.requires_grad_()
    seen = torch.ones(length, length).bool().tril()[-rows:]
    seen[64:128] = False
    where = positions[-rows:], positions
    got = add_term_to_scores(encoding, scores, q, None, *where, mask=seen[None, None]) - scores
    gates = scores.sigmoid().masked_fill(~seen, 0)
    count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=39)
    table = q @ encoding.e.mT * 8**-0.5
    whole = count.detach().floor().long()
    low, high = table.gather(-1, whole), table.gather(-1, (whole + 1).clamp(max=39))
    want = low + (count - whole) * (high - low)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(got)
    grads = [
        torch.autograd.grad((t * weight).sum(), scores, retain_graph=True)[0] for t in (got, want)
    ]
    torch.testing.assert_close(*grads)


def test_not_a_number_stays_in_its_row():
    encoding = filled(num_positions=3)
    q, k, v = (torch.randn(1, 1, 4, 4).double() for _ in range(3))
    q[0, 0, 1, 0] = torch.nan
    out = attend(q, k, v, encoding, torch.arange(4))
    assert out.isnan().any(-1).tolist() == [[[False, True, False, False]]]
