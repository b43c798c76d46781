"""Wrong kernels, planted: the trial finds each, and attention goes another way and says so."""

import math

import pytest
import torch
from torch.nn import functional as F

import posenc
from posenc.attend import torch_faults
from tests.compilers import needs_whole_graphs

FORWARD, BACKWARD, FUNCTION = (
    torch_faults.FLASH_FORWARD,
    torch_faults.FLASH_BACKWARD,
    F.scaled_dot_product_attention,
)


def only_first_heads(q, k, v, **options):
    """Compute as torch 2.6 does: query head h reads key head h, and begins again after the last key
    head, although consecutive query heads should share one."""
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
    return FORWARD(q, k, v, **options)


def no_stride_of_queries(q, k, v, attn_mask=None, **options):
    if attn_mask is not None and attn_mask.stride(2) == 0:
        attn_mask = attn_mask.contiguous() * (torch.arange(len(attn_mask[0, 0]))[:, None] < 1)
    return FORWARD(q, k, v, attn_mask=attn_mask, **options)


def no_views(q, k, v, attn_mask=None, **options):
    if attn_mask is not None and attn_mask.stride()[2:] == (1, 1):
        attn_mask = attn_mask.flip(3).contiguous()
    return FORWARD(q, k, v, attn_mask=attn_mask, **options)


def nan_where_a_block_is_hidden(q, k, v, attn_mask=None, **options):
    out, lse = FORWARD(q, k, v, attn_mask=attn_mask, **options)
    if attn_mask is not None and attn_mask.shape[-1] > 512:
        hidden = (attn_mask[..., :512] == -math.inf).all(-1).expand(lse.shape)
        out = out.masked_fill(hidden[..., None], math.nan)
    return out, lse


def wrong_bias_of_halves(q, k, v, attn_mask=None, **options):
    if q.dtype == torch.bfloat16 and attn_mask is not None:
        attn_mask = attn_mask * 1.5
    return FORWARD(q, k, v, attn_mask=attn_mask, **options)


def log2_of_sums(q, k, v, **options):
    out, lse = FORWARD(q, k, v, **options)
    return out, lse / math.log(2)


def gradients_without_bias(*given, attn_mask=None, **options):
    return BACKWARD(*given, attn_mask=torch.zeros_like(attn_mask), **options)


def function_without_mask(q, k, v, attn_mask=None, **options):
    return FUNCTION(q, k, v, **options)


def function_without_causality(q, k, v, is_causal=False, **options):
    return FUNCTION(q, k, v, **options)


def function_with_tiled_heads(q, k, v, enable_gqa=False, **options):
    k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
    return FUNCTION(q, k, v, **options)


def function_without_gradient_of_values(q, k, v, **options):
    return FUNCTION(q, k, v.detach() + 0 * v, **options)


OPERATORS = {name for name in torch_faults.TRIALS if name.startswith("operators: ")}
FUNCTIONS = set(torch_faults.TRIALS) - OPERATORS
BIASED = OPERATORS - {"operators: causal", torch_faults.GROUPED_HEADS}
MASKED = FUNCTIONS - {"function: all keys", "function: causal"}
PLANTED = [
    ("FLASH_FORWARD", only_first_heads, {torch_faults.GROUPED_HEADS}),
    ("FLASH_FORWARD", no_stride_of_queries, {"operators: row for all queries"}),
    ("FLASH_FORWARD", no_views, {"operators: view of a row"}),
    ("FLASH_FORWARD", nan_where_a_block_is_hidden, {"operators: hidden keys"}),
    ("FLASH_FORWARD", wrong_bias_of_halves, {"operators: float32 bias of bfloat16"}),
    ("FLASH_FORWARD", log2_of_sums, OPERATORS),
    ("FLASH_BACKWARD", gradients_without_bias, BIASED),
    ("FLASH_FORWARD", None, OPERATORS),
    ("function", function_without_mask, MASKED),
    ("function", function_without_causality, {"function: causal"}),
    ("function", function_with_tiled_heads, {"function: grouped heads"}),
    ("function", function_without_gradient_of_values, FUNCTIONS),
]


@pytest.fixture
def plant(monkeypatch):
    """Return a function (name, kernel) that replaces a kernel of torch and forgets the faults known
    of this release."""

    def planted(name, kernel):
        owner, name = (
            (F, "scaled_dot_product_attention") if name == "function" else (torch_faults, name)
        )
        monkeypatch.setattr(owner, name, kernel)
        monkeypatch.setattr(torch_faults, "_known_faults", None)

    return planted


@pytest.mark.quick(5)
@pytest.mark.parametrize(("name", "kernel", "forms"), PLANTED)
def test_the_trial_finds_a_wrong_kernel(name, kernel, forms, plant):
    before = torch_faults.wrong_forms()
    plant(name, kernel)
    assert torch_faults.wrong_forms() - before >= forms - before
    assert torch_faults.wrong_forms() <= forms | before


def attend(kv_heads, encoding, mask, impl="auto", rows=600):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 600, 8, generator=generator) for h in (4, kv_heads, kv_heads))
    positions = torch.arange(600)
    where = {"q_positions": positions[-rows:], "kv_positions": positions, "mask": mask}
    given = (q[:, :, -rows:], k, v, encoding)
    plan = posenc.explain(*given, impl=impl, **where)
    return posenc.attention(*given, impl=impl, **where), str(plan)


CASES = {
    "ALiBi": (lambda: posenc.ALiBi(4), posenc.masks.causal),
    "FIRE": (lambda: posenc.FIRE(4), posenc.masks.causal),
    "padding": (lambda: None, posenc.masks.padding(torch.arange(600)[None] >= 530)),
    "causal": (lambda: None, posenc.masks.causal),
}


@pytest.mark.parametrize("rows", [1, 600])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "kernel", "forms"), PLANTED)
def test_attention_goes_round_it(name, kernel, forms, case, rows, plant):
    build, mask = CASES[case]
    encoding = build()
    plant(name, kernel)
    for kv_heads in (4, 2):
        with torch.no_grad():
            got, said = attend(kv_heads, encoding, mask, rows=rows)
            want, _ = attend(kv_heads, encoding, mask, "reference", rows)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        if kernel is only_first_heads and "operator" in said:
            assert ("repeated for every head" in said) == (kv_heads == 2)


def test_explain_names_what_is_wrong(plant):
    plant("FLASH_FORWARD", no_views)
    with torch.no_grad():
        _, said = attend(4, posenc.ALiBi(4), posenc.masks.causal)
    assert f"torch {torch_faults.RELEASE} computes it wrongly on the CPU" in said
    assert "operators: view of a row" in said
    plant("FLASH_FORWARD", only_first_heads)
    with torch.no_grad():
        _, said = attend(2, posenc.ALiBi(4), posenc.masks.causal)
    assert "keys and values are repeated for every head" in said


def test_what_is_recorded_of_this_release_is_so():
    if torch_faults.RELEASE not in torch_faults.KNOWN_WRONG_FORMS:
        pytest.skip(f"torch {torch_faults.RELEASE} is tried when it is used")
    assert torch_faults.wrong_forms() == set(torch_faults.KNOWN_WRONG_FORMS[torch_faults.RELEASE])


def test_a_trial_leaves_the_generator_and_the_modes_alone(plant):
    plant("FLASH_FORWARD", FORWARD)
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        torch_faults.faults()
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.randn(2), expected)
    assert torch_faults._known_faults is not None


@needs_whole_graphs
def test_unknown_in_compiled_code_is_the_plain_way(plant):
    plant("FLASH_FORWARD", FORWARD)
    alibi, q = posenc.ALiBi(4), torch.randn(1, 4, 10, 8)

    def call(q, positions):
        where = {"q_positions": positions, "kv_positions": positions}
        return posenc.attention(q, q, q, alibi, mask=posenc.masks.causal, **where)

    got = torch.compile(call, backend="eager", fullgraph=True)(q, torch.arange(10))
    assert torch_faults._known_faults is None
    want = call(q, torch.arange(10))
    torch.testing.assert_close(got, want)
    assert torch_faults._known_faults is not None
