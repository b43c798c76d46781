"""Shaw's relative representations: the authors' values, the paper's formula, and its claims."""

import numpy as np
import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.values.shaw import Shaw
from posenc.testing.harness import add_term_to_scores, as_tokens
from tests.attending import attend
from tests.golden_values import Case, cases
from tests.references import shaw as paper


def filled(head_dim: int, max_distance: int, seed: int = 0) -> Shaw:
    torch.manual_seed(seed)
    encoding = Shaw(head_dim, max_distance=max_distance).double()
    for table in encoding.parameters():
        table.data = torch.randn_like(table)
    return encoding


@pytest.mark.golden("shaw")
@pytest.mark.parametrize("case", cases("shaw"))
def test_shaw_matches_the_authors_code(case: Case):
    inputs = case.inputs
    encoding = Shaw(inputs["q"].shape[-1], max_distance=case.params["max_relative_position"])
    encoding.key_table.data = inputs["rel_k"]
    encoding.value_table.data = inputs["rel_v"]
    q_positions, kv_positions = inputs["q_positions"], inputs["kv_positions"]
    case.assert_close("rel_index", encoding.table_row(q_positions[:, None] - kv_positions))
    # The authors' function leaves the scale to its caller.
    q = inputs["q"] * inputs["q"].shape[-1] ** 0.5
    scores = q @ inputs["k"].mT * q.shape[-1] ** -0.5
    logits = (
        add_term_to_scores(encoding, scores, q, None, q_positions, kv_positions) + inputs["bias"]
    )
    case.assert_close("logits", logits)
    seen = inputs["bias"][0, 0] > -1
    mask = masks.Mask(lambda pairs: seen[pairs.q_idx, pairs.kv_idx])
    out = posenc.attention(
        q,
        inputs["k"],
        inputs["v"],
        encoding,
        q_positions=q_positions,
        kv_positions=kv_positions,
        mask=mask,
    )
    case.assert_close("output", out)


@pytest.mark.parametrize("max_distance", [1, 3, 40])
@pytest.mark.parametrize("layout", ["run", "later queries", "scattered"])
def test_shaw_matches_the_paper(max_distance: int, layout: str):
    encoding = filled(4, max_distance)
    kv_positions = torch.arange(13) if layout != "scattered" else torch.randperm(40)[:13]
    q_positions = {
        "run": kv_positions,
        "later queries": torch.arange(30, 37),
        "scattered": torch.tensor([0, 50, 3, 9]),
    }[layout]
    q = torch.randn(1, 4, len(q_positions), 4).double()
    k, v = (torch.randn(1, 2, 13, 4).double() for _ in range(2))
    visible = torch.ones(len(q_positions), 13, dtype=torch.bool)
    out = posenc.attention(
        q, k, v, encoding, q_positions=q_positions, kv_positions=kv_positions, impl="reference"
    )
    want = paper.attend(
        q[0].numpy(),
        k[0].numpy(),
        v[0].numpy(),
        encoding.key_table.detach().numpy(),
        encoding.value_table.detach().numpy(),
        q_positions.numpy(),
        kv_positions.numpy(),
        visible.numpy(),
    )
    np.testing.assert_allclose(out[0].detach().numpy(), want, rtol=1e-12, atol=1e-12)


def test_shaw_pointwise_and_block_forms_agree():
    encoding = filled(4, 3)
    q = torch.randn(2, 2, 5, 4).double()
    batch, head = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    q_idx, kv_idx = torch.arange(5)[:, None], torch.arange(9)
    for kv_positions in (
        torch.arange(9),
        torch.randperm(9),
        torch.arange(9) + torch.zeros(2, 1).long(),
    ):
        where = (q, None, torch.arange(4, 9), kv_positions)
        scores = torch.zeros(2, 2, 5, 9).double()
        pair = encoding.term(*as_tokens(*where)).make_score_mod()
        torch.testing.assert_close(
            pair(scores, batch, head, q_idx, kv_idx), add_term_to_scores(encoding, scores, *where)
        )


def test_shaw_is_constant_from_max_distance_on():
    encoding = filled(4, 3)
    q = torch.randn(1, 1, 1, 4).double()
    zeros = torch.zeros(1, 1, 1, 200).double()
    row = add_term_to_scores(encoding, zeros, q, None, torch.tensor([100]), torch.arange(200))[
        0, 0, 0
    ]
    assert row[:98].unique().numel() == 1 and row[103:].unique().numel() == 1
    assert row[97:104].unique().numel() == 7


def test_shaw_makes_no_tensor_of_pairs_times_channels():
    encoding = filled(32, 4).float()
    q = torch.randn(1, 1, 64, 32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        attend(q, q, q, encoding, torch.arange(64), mask=None)
    assert largest <= 4 * 64 * 64 * 2 + 4096


def test_shaw_gradients_reach_both_tables_for_runs_and_scattered_positions():
    encoding = filled(3, 2)
    q, k, v = (torch.randn(1, 1, 4, 3).double().requires_grad_() for _ in range(3))

    def run(positions, q, k, v, key_table, value_table):
        return torch.func.functional_call(
            AsModule(encoding, positions),
            {"encoding.key_table": key_table, "encoding.value_table": value_table},
            (q, k, v),
        )

    tables = [t.detach().clone().requires_grad_() for t in encoding.parameters()]
    for positions in (torch.arange(4), torch.tensor([5, 0, 2, 9])):
        assert torch.autograd.gradcheck(
            lambda *a, p=positions: run(p, *a), (q, k, v, *tables), fast_mode=True
        )


class AsModule(torch.nn.Module):
    def __init__(self, encoding, positions):
        super().__init__()
        self.encoding, self.positions = encoding, positions

    def forward(self, q, k, v):
        return attend(q, k, v, self.encoding, self.positions, mask=None, impl="reference")


def test_shaw_without_values_acts_on_scores_alone():
    encoding = Shaw(4, values=False)
    assert encoding.claims.places == (3,)
    assert encoding.num_parameters == 33 * 4
    assert Shaw(4).num_parameters == 2 * 33 * 4


def test_shaw_refuses_what_it_cannot_serve():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        Shaw(4, max_distance=0)
    with pytest.raises(TypeError, match=r"integers.*float32"):
        p = torch.arange(3.0)
        posenc.attention(q, q, q, Shaw(4), q_positions=p, kv_positions=p)
    with pytest.raises(ValueError, match=r"head_dim=8, got 4 \(q with shape \(1, 1, 3, 4\)\)"):
        p = torch.arange(3)
        posenc.attention(q, q, q, Shaw(8), q_positions=p, kv_positions=p)
