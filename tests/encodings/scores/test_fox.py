"""FoX against the authors' reference, its identities and its state."""

import pytest
import torch
from torch.nn import functional as F

from posenc import ALiBi, Attention, KVCache, attention, masks
from posenc.encodings.base.position_encoding import check_state_shape
from posenc.encodings.scores.fox import FoX
from posenc.testing.harness import add_term_to_scores
from tests.attending import attend
from tests.golden_values import Case, cases


def gates(logits: torch.Tensor) -> tuple[FoX, torch.Tensor]:
    """An encoding, and inputs x for which its gate logits are `logits` (batch, heads, len)."""
    heads = logits.shape[1]
    fox = FoX(heads, heads).to(logits.dtype)
    fox.load_state_dict({"gate.weight": torch.eye(heads), "gate.bias": torch.zeros(heads)})
    return fox, logits.transpose(1, 2)


@pytest.mark.golden("fox")
@pytest.mark.parametrize("case", cases("fox"))
def test_logits_and_output_equal_the_authors(case: Case):
    q, k, v = (case.inputs[name] for name in "qkv")
    fox, x = gates(case.inputs["fgate_logit"])
    q_positions, kv_positions = case.inputs["q_positions"], case.inputs["kv_positions"]
    kv_state = fox.state(x, kv_positions)
    q_state = kv_state[:, :, -q.shape[2] :]
    batch, heads, q_len, kv_len = case.expected["logits"].shape
    grid = (
        torch.arange(batch)[:, None, None, None],
        torch.arange(heads)[:, None, None],
        torch.arange(q_len)[:, None],
        torch.arange(kv_len),
    )
    mask = masks.causal
    if "seq_start" in case.inputs:
        mask = mask & masks.padding(torch.arange(kv_len) >= case.inputs["seq_start"][:, None])
    seen = mask.bind(q_positions, kv_positions)(*grid).expand(batch, heads, q_len, kv_len)
    where = (q, None, q_positions, kv_positions, q_state, kv_state)
    zeros = q.new_zeros(batch, heads, q_len, kv_len)
    case.assert_close("decay_bias", add_term_to_scores(fox, zeros, *where), where=seen)
    logits = add_term_to_scores(fox, q @ k.mT * case.params["sm_scale"], *where)
    case.assert_close("logits", logits.masked_fill(~seen, -torch.inf))
    out = attention(
        q * (case.params["sm_scale"] * q.shape[-1] ** 0.5),
        k,
        v,
        fox,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_state=q_state,
        kv_state=kv_state,
        mask=mask,
    )
    case.assert_close("output", out)


@pytest.mark.parametrize("case", cases("fox_bias_xtransformers"))
def test_bias_equals_xtransformers(case: Case):
    """Its bidirectional form is not masked; of the causal one only the past is compared."""
    causal, dim, heads = (case.params[name] for name in ("causal", "dim", "heads"))
    fox = FoX(dim, heads, bidirectional=not causal).double()
    fox.load_state_dict({"gate.weight": case.inputs["weight"], "gate.bias": case.inputs["bias"]})
    x = case.inputs["x"]
    positions = torch.arange(x.shape[1])
    state = fox.state(x, positions)
    zeros = x.new_zeros(x.shape[0], heads, len(positions), len(positions))
    bias = add_term_to_scores(fox, zeros, zeros, None, positions, positions, state, state)
    past = (positions[:, None] >= positions).expand(bias.shape)
    case.assert_close("score_bias", bias, where=past if causal else None)


def test_bidirectional_gates_sum_over_the_tokens_between():
    torch.manual_seed(0)
    fox = FoX(6, 2, bidirectional=True).double()
    torch.nn.init.normal_(fox.gate.weight)
    x, positions = torch.randn(1, 5, 6, dtype=torch.float64), torch.arange(5)
    state = fox.state(x, positions)
    q = x.new_zeros(1, 2, 5, 1)
    bias = add_term_to_scores(
        fox, x.new_zeros(1, 2, 5, 5), q, None, positions, positions, state, state
    )
    log_f = F.logsigmoid(fox.gate(x))[0].T.reshape(2, 2, 5)  # direction, head, token
    for head in range(2):
        for i in range(5):
            for j in range(5):
                between = log_f[0, head, j + 1 : i + 1] if j <= i else log_f[1, head, i + 1 : j + 1]
                torch.testing.assert_close(
                    bias[0, head, i, j], between.sum(), rtol=1e-12, atol=1e-12
                )


def test_constant_gate_is_alibi():
    """f = exp(-slope) everywhere (section 5 of the methods)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64)
    slopes = torch.tensor(ALiBi(4).slopes, dtype=torch.float64)
    fox, x = gates(-slopes.expm1().log()[None, :, None].expand(1, 4, 9))
    places = {"q_positions": torch.arange(9), "kv_positions": torch.arange(9)}
    state = fox.state(x, places["q_positions"])
    got = attention(q, k, v, fox, q_state=state, kv_state=state, mask=masks.causal, **places)
    want = attention(q, k, v, ALiBi(4), mask=masks.causal, **places)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_open_gate_is_no_encoding():
    q, k, v = torch.randn(3, 1, 2, 7, 8, dtype=torch.float64)
    fox, x = gates(torch.full((1, 2, 7), 800.0, dtype=torch.float64))
    places = {"q_positions": torch.arange(7), "kv_positions": torch.arange(7)}
    state = fox.state(x, places["q_positions"])
    got = attention(q, k, v, fox, q_state=state, kv_state=state, mask=masks.causal, **places)
    torch.testing.assert_close(got, attention(q, k, v, mask=masks.causal, **places))


def test_cable_is_the_negated_gate():
    """CABLE's bias is the running sum of -softplus(a) (arXiv:2503.08067)."""
    a = torch.randn(1, 2, 7, dtype=torch.float64)
    fox, x = gates(-a)
    state = fox.state(x, torch.arange(7))
    torch.testing.assert_close(state, (-F.softplus(a)).cumsum(-1))


def test_bias_far_into_a_sequence_is_as_exact_as_near_the_start():
    """float32 running sums would be off by 4e-3 here."""
    torch.manual_seed(0)
    logits = torch.randn(1, 1, 100_000)
    fox, x = gates(logits)
    state = fox.state(x, torch.arange(100_000))
    got = state[0, 0, -1] - state[0, 0, -9]
    want = F.logsigmoid(logits[0, 0, -8:].double()).sum()
    assert abs(got - want) < 1e-6


def test_decoding_carries_the_sum_in_the_cache():
    torch.manual_seed(0)
    layer = Attention(16, 4, 2, FoX(16, 4))
    x, positions = torch.randn(2, 11, 16), torch.arange(11)
    full = layer(x, positions, mask=masks.causal)
    cache = KVCache()
    steps = [
        layer(x[:, t : t + 1], positions[t : t + 1], mask=masks.causal, cache=cache)
        for t in range(11)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-5, atol=1e-6)
    assert cache.state is not None and cache.state.dtype == torch.float64


def test_start_sets_the_gate():
    for bias_init, f in ((0.0, 0.5), (5.0, 0.9933)):
        fox = FoX(16, 4, bias_init=bias_init)
        state = fox.state(torch.zeros(1, 1, 16), torch.arange(1))
        torch.testing.assert_close(state.exp(), torch.full_like(state, f), rtol=1e-4, atol=0)


def test_states_are_asked_for():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"encoding\.state"):
        attend(q, q, q, FoX(8, 2), torch.arange(3))


@pytest.mark.quick(2)
@pytest.mark.parametrize("gate", [-3.0, 0.0, 7.0])
@torch.no_grad()
def test_a_row_of_bias_per_block_equals_the_reference(gate):
    """Steep gates leave most keys out, gentle ones none."""
    torch.manual_seed(0)
    length = 1300
    q, k, v = (torch.randn(2, heads, length, 16) for heads in (4, 2, 2))
    fox, x = gates(torch.randn(2, 4, length) + gate)
    positions = torch.arange(length)
    state = fox.state(x, positions)

    def run(impl, dtype=torch.float32):
        return attend(q.to(dtype), k.to(dtype), v.to(dtype), fox, positions, state=state, impl=impl)

    # Within a block of 128 queries terms reach 200, and float32 resolves 1.5e-5 there.
    torch.testing.assert_close(
        run("sdpa").double(), run("reference", torch.float64), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 4, 3, 1)])
def test_a_state_with_other_axes_is_refused(shape):
    with pytest.raises(ValueError, match=r"q_state and kv_state must be \(batch, 4, len\)"):
        check_state_shape(FoX(32, 4), torch.zeros(shape), 4)
