"""FlexAttention runs the encodings' own score_mod, or says why it cannot."""

import functools
import itertools
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as flex_of_torch

import posenc
from posenc import masks
from posenc.attend import choose, flex_options
from posenc.attend.problem_builder import build_problems
from posenc.attend.ways import flex, reference
from tests.attending import attend
from tests.compilers import needs_inductor

SHAPE = posenc.ModelShape(64, 4, 2, 16)
LEARNED = ("t5", "kerple", "fire", "fox")
MODS = ("alibi", "deberta", "transformer_xl", "inkling", *LEARNED)
"""Encodings with a score_mod, of every kind of term."""
IDS = torch.tensor([0] * 50 + [1] * 100)
MASKS = {
    "none": None,
    "causal": masks.causal,
    "window": masks.causal & masks.sliding_window(40),
    "chunks": masks.causal & masks.chunked(64),
    "sinks": masks.attention_sinks(2, 30),
}


def problem(
    encoding, mask=None, q_len=150, kv_len=150, q_at=None, kv_at=None, grad=False, **options
):
    """Build an attention of two rows, with 4 heads of queries and 2 of keys. q_at: positions of the
    queries, or only the position of the first query."""
    torch.manual_seed(0)
    if isinstance(encoding, str):
        encoding = posenc.create(encoding, SHAPE).requires_grad_(grad)
    sizes = ((4, q_len), (2, kv_len), (2, kv_len))
    q, k, v = (torch.randn(2, *size, 16, requires_grad=grad) for size in sizes)
    x = torch.randn(2, max(q_len, kv_len), 64)
    state = encoding.state(x, torch.arange(x.shape[1]))
    if state is not None:
        options |= {"q_state": state[:, :, :q_len], "kv_state": state[:, :, :kv_len]}
    first = kv_len - q_len if q_at is None else q_at
    (built,) = build_problems(
        q,
        k,
        v,
        encoding,
        q_positions=range(first, first + q_len) if isinstance(first, int) else first,
        kv_positions=range(kv_len) if kv_at is None else kv_at,
        mask=mask,
        **options,
    )
    return built


def on_cuda(built, dtype=torch.bfloat16):
    """Return the attention with queries that claim to be on a GPU, for code that only asks for
    their device."""
    q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=built.q.shape)
    q.element_size = lambda: dtype.itemsize
    return replace(built, q=q)


def numbers_in(part):
    """Return the Python numbers that a function captures, at any depth, without True and False,
    which choose between two codes."""
    if isinstance(part, bool | str | torch.Tensor | torch.device | None):
        return []
    if isinstance(part, int | float | range):
        return [part]
    if isinstance(part, functools.partial):
        inner = [part.func, *part.args, *part.keywords.values()]
    elif isinstance(part, FunctionType):
        inner = [cell.cell_contents for cell in part.__closure__ or ()]
    elif isinstance(part, masks.Mask):
        inner = [part.predicate, part.q_positions, part.kv_positions]
    elif isinstance(part, list | tuple):
        inner = part
    elif isinstance(part, dict):
        inner = part.values()
    else:
        inner = vars(part).values() if hasattr(part, "__dict__") else []
    return [number for each in inner for number in numbers_in(each)]


@pytest.mark.parametrize("at", [None, torch.arange(300).view(2, 150)])
@pytest.mark.parametrize("name", MODS)
def test_score_mods_capture_tensors_only(name, at):
    assert numbers_in(flex.score_mod(problem(name, q_at=at, kv_at=at))) == []


@pytest.mark.parametrize("at", [None, torch.arange(300).view(2, 150)])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_masks_capture_tensors_only(name, at):
    built = problem("alibi", MASKS[name], q_at=at, kv_at=at)
    assert numbers_in(flex.block_mask(built).mask_mod) == []


def test_captured_numbers_are_found():
    shift, inner = 3, functools.partial(max, 2.5)
    assert numbers_in(lambda score: score + shift + inner(score)) == [2.5, 3]
    assert numbers_in(masks.chunked(7).bind(range(3), range(3))) == [7, range(3), range(3)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_exact_block_masks_are_those_that_torch_finds_pair_by_pair(causal, window):
    for shift, q_len, kv_len in itertools.product((0, 7, -3, 300), (1, 129, 256), (1, 128, 300)):
        mask = masks.causal if causal else masks.full
        mask = mask if window is None else mask & masks.sliding_window(window)
        want = flex_of_torch.create_block_mask(
            mask.bind(range(shift, shift + q_len), range(kv_len)), None, None, q_len, kv_len, "cpu"
        )
        built = problem("nope", mask, q_len, kv_len, shift)
        got = flex._exact_block_mask(*built.visible_distances, q_len, kv_len, torch.device("cpu"))
        assert got.seq_lengths == want.seq_lengths and got.BLOCK_SIZE == want.BLOCK_SIZE
        for side, kind in itertools.product(("kv", "q"), ("num_blocks", "indices")):
            for name in (f"{side}_{kind}", f"full_{side}_{kind}"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_exact_block_masks_are_kept_for_the_next_layer_and_the_next_step():
    built = problem("alibi", masks.causal)
    with torch.inference_mode():
        kept = flex.block_mask(built)
    assert flex.block_mask(problem("t5", masks.causal)) is kept
    assert not kept.kv_indices.is_inference(), "a training step can use it"
    assert flex.block_mask(problem("alibi", masks.causal, q_len=149)) is not kept
    other = problem("alibi", masks.causal & masks.document(IDS))
    assert flex.block_mask(other) is not flex.block_mask(other), "documents may have changed"


def test_rows_of_a_batch_have_a_block_mask_each_if_their_keys_are_at_other_positions():
    at = torch.stack([torch.arange(300), torch.arange(300) + 150])
    built = problem("alibi", masks.causal, 300, 300, torch.arange(300), at)
    assert flex.block_mask(built).kv_indices.shape[0] == 2


def within(pairs, width=1):
    """A mask of a user: which keys are nearer than `width`."""
    return (pairs.q_position - pairs.kv_position).abs() < width


CASES = {
    "odd lengths": {},
    "a whole block": {"q_len": 128, "kv_len": 128},
    "one more": {"q_len": 129, "kv_len": 257},
    "one query": {"q_len": 1, "kv_len": 150},
    "one key": {"q_len": 1, "kv_len": 1},
    "positions of each row": {
        "q_at": torch.stack([torch.arange(150), torch.arange(150) * 2]),
        "kv_at": torch.stack([torch.arange(150), torch.arange(150) * 2]),
    },
    "documents": {"mask": masks.causal & masks.document(IDS)},
    "padding": {"mask": masks.causal & masks.padding((torch.arange(150) > 9).expand(2, -1))},
    "queries without a key": {"mask": masks.causal & masks.sliding_window(20), "q_at": 100},
    "an argument by its name": {"mask": masks.Mask(functools.partial(within, width=30))},
    **{f"mask {name}": {"mask": mask} for name, mask in MASKS.items()},
}
KINDS_AND_CASES = (
    *((name, "odd lengths") for name in MODS),
    *(("t5", case) for case in CASES if case != "odd lengths"),
    *(("deberta", case) for case in ("one query", "documents", "positions of each row")),
)
"""Every kind of term once; every case where a distance has a parameter, and a few where a pair has
one. Each is traced by torch for half a second."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.quick(4)
@pytest.mark.parametrize(("name", "case"), KINDS_AND_CASES)
def test_values_and_gradients_equal_the_reference_and_are_no_nan(name, case, monkeypatch):
    """Uncompiled, where FlexAttention has a backward pass, and reads the mask pair by pair."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda *kind: flex._attend_to_parts)
    monkeypatch.setattr(flex_of_torch, "_validate_device", lambda *tensors: None)
    built = problem(name, **{"mask": masks.causal} | CASES[case], grad=True)
    leaves = [built.q, built.k, built.v, *built.encoding.parameters()]
    found = []
    for way in (flex, reference):
        out, _ = way.run(built)
        torch.manual_seed(1)
        grads = torch.autograd.grad(out, leaves, torch.randn_like(out), allow_unused=True)
        found.append([out, *(torch.zeros(1) if grad is None else grad for grad in grads)])
        built = problem(name, **{"mask": masks.causal} | CASES[case], grad=True)
        leaves = [built.q, built.k, built.v, *built.encoding.parameters()]
    for got, want in zip(*found, strict=True):
        assert got.isfinite().all()
        # float32 sums in another order, of up to 150 * 150 pairs
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


FORMULAS = {
    "ALiBi": lambda: posenc.ALiBi(4),
    "learned ALiBi": lambda: posenc.ALiBi(4, learned=True),
    "one side": lambda: posenc.ALiBi(4, form="left_right"),
    "KERPLE": lambda: posenc.Kerple(4),
    "power": lambda: posenc.Kerple(4, form="power"),
    "sum": lambda: posenc.Compose(posenc.ALiBi(4), posenc.Kerple(4)),
}
"""Encodings whose bias FlexAttention computes instead of reading it."""


def added(mod, q_idx, kv_idx, batch=0):
    """Return what a score_mod adds to scores, (heads, len)."""
    rows = [torch.full((), batch), torch.arange(4)[:, None], q_idx, kv_idx]
    return mod(torch.zeros(4, len(q_idx)), *rows).detach().double()


def bias_at(encoding, distance):
    """Return the bias of distances in float64."""
    parts = encoding.encodings if isinstance(encoding, posenc.Compose) else [encoding]
    return sum(part.bias(distance.double()[None])[:, 0] for part in parts).detach()


@pytest.mark.parametrize("first", [0, 1000, 2**24 - 100, 2**24 + 3, 2**40 + 1])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_the_bias_at_any_distance(name, first):
    """Beyond 2**24 float32 has no odd numbers: a difference of two rounded positions is wrong."""
    encoding = FORMULAS[name]().requires_grad_(False)
    built = problem(encoding, masks.causal, q_at=first)
    i, j = torch.arange(150), torch.arange(150).flip(0)
    got, want = added(flex._formula_score_mod(built), i, j), bias_at(encoding, first + i - j)
    # float32 rounds the distance, r1 and r2; log and exp2 of large numbers are less exact
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_kernel_reads_what_is_dear_to_compute(name):
    """On an H100, 8,192 tokens by KERPLE's logarithm take 1.59 ms, and from a table 0.97."""
    encoding = FORMULAS[name]().requires_grad_(False)
    kind = flex_options.bias_kind(problem(encoding, masks.causal))
    assert (kind == "table") == (name in ("KERPLE", "power", "sum"))
    at = torch.stack([torch.arange(150), 3 * torch.arange(150)])
    kind = flex_options.bias_kind(problem(encoding, masks.causal, q_at=at, kv_at=at))
    assert kind.startswith("pairs _"), "a table of all pairs would be large"


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_subtract_positions_exactly_that_are_no_run(name):
    """Of two rows of a batch, the second one far from 0, with gaps."""
    encoding = FORMULAS[name]().requires_grad_(False)
    at = torch.stack([torch.arange(150), 10**15 + 3 * torch.arange(150)])
    mod = flex.score_mod(problem(encoding, masks.causal, q_at=at, kv_at=at))
    i, j = torch.arange(150), torch.arange(150).flip(0)
    for row in range(2):
        want = bias_at(encoding, at[row, i] - at[row, j])
        torch.testing.assert_close(added(mod, i, j, row), want, rtol=1e-5, atol=1e-6)


def test_a_subclass_with_another_bias_is_not_computed_by_its_parents_formula():
    class Steeper(posenc.ALiBi):
        def bias(self, distance):
            return 3 * super().bias(distance)

    changed = posenc.ALiBi(4)
    changed.bias = Steeper(4).bias
    i, j = torch.arange(150), torch.zeros(150, dtype=torch.long)
    for encoding in (Steeper(4), changed):
        built = problem(encoding, masks.causal)
        assert flex_options.bias_kind(built) == "table"
        want = 3 * bias_at(posenc.ALiBi(4), i)
        torch.testing.assert_close(added(flex.score_mod(built), i, j), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("last", [-70_000.0, -3e6])
def test_fox_subtracts_far_running_sums_exactly_without_float64(last):
    """Of 100,000 gates of a half the running sum is -69,315; float32 rounds it to 0.008, which is
    more than what a gate of 0.995 takes away."""
    fox = posenc.FoX(64, 4).requires_grad_(False)
    gates = -0.005 * torch.rand(1, 4, 150, dtype=torch.float64)
    state = last + gates.cumsum(2)
    built = problem(fox, masks.causal)
    side = {"state": state}
    q, k = (tokens_with(tokens, **side) for tokens in (built.queries, built.keys))
    with torch.no_grad():
        mod = fox.term(q, k).make_score_mod()
    i, j = torch.arange(150), torch.arange(150).flip(0)
    got = mod(torch.zeros(4, 150), torch.tensor(0), torch.arange(4)[:, None], i, j)
    assert got.dtype == torch.float32
    want = torch.stack(
        [state[0, :, int(a)] - state[0, :, int(b)] for a, b in zip(i, j, strict=True)], dim=1
    )
    # float32 rounds the result, and 2**-46 of the sums remains
    torch.testing.assert_close(got.double(), want, rtol=2.0**-22, atol=2.0**-46 * -last)


def tokens_with(tokens, state):
    return posenc.Tokens(torch.zeros(1, 4, state.shape[2], 16), tokens.positions_or_range, state)


def test_fox_reads_all_differences_only_to_learn():
    for grad, cells in ((False, "q_high"), (True, "bias")):
        built = problem("fox", masks.causal, grad=grad)
        with torch.set_grad_enabled(grad):
            mod = built.term.make_score_mod()
        assert cells in mod.__code__.co_freevars
        assert (flex.cost(built).extra_bytes >= 4 * 4 * 150 * 150) == grad


@pytest.fixture
def uncompiled(monkeypatch):
    """Let FlexAttention run uncompiled, because then it has a backward pass on the CPU."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda *kind: flex._attend_to_parts)
    monkeypatch.setattr(flex, "DEVICES_WITHOUT_LSE", ())
    monkeypatch.setattr(flex_of_torch, "_validate_device", lambda *tensors: None)


def results(way, name, **options):
    """Return output, log-sum-exp if asked for, and gradients of an attention."""
    built = problem(name, grad=True, **options)
    leaves = [built.q, built.k, built.v, *built.encoding.parameters()]
    outs = [t for t in way.run(built) if t is not None]
    torch.manual_seed(1)
    grads = torch.autograd.grad(outs, leaves, [torch.randn_like(t) for t in outs])
    return [*outs, *grads]


LONG = {
    "self": {"q_len": 1100, "kv_len": 1100},
    "after 200 keys": {"q_len": 1100, "kv_len": 1300},
    "a window": {
        "q_len": 1300,
        "kv_len": 1300,
        "mask": masks.causal & masks.sliding_window(1200),
    },
    "log-sum-exp": {"q_len": 1100, "kv_len": 1100, "return_lse": True},
}


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", LONG)
def test_t5_attends_to_far_keys_without_a_table(case, monkeypatch):
    options = {"mask": masks.causal} | LONG[case]
    parts = []
    plain = flex._near_and_far_masks
    monkeypatch.setattr(
        flex, "_near_and_far_masks", lambda *a: parts.append(plain(*a)) or parts[-1]
    )
    got, want = (results(way, "t5", **options) for way in (flex, reference))
    assert len(parts) == 1
    for mine, other in zip(got, want, strict=True):
        scale = other.abs().max()
        # float32 sums in another order, of up to 1,300 keys and as many queries
        torch.testing.assert_close(mine / scale, other / scale, rtol=0, atol=3e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["t5", "kerple"])
def test_gradients_of_learned_biases_are_the_same_bit_for_bit(name):
    first, second = (results(flex, name, mask=masks.causal) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("name", "grad", "backend", "why"),
    [
        ("t5", True, "AUTO", "few queries"),
        ("deberta", True, "TRITON", "gives a bias no gradient"),
        ("fox", True, "TRITON", "gives a bias no gradient"),
        ("alibi", True, "AUTO", "few queries"),
        ("t5", False, "AUTO", "few queries"),
    ],
)
def test_the_backend_is_named_with_its_reason(name, grad, backend, why):
    built = problem(name, grad=grad)
    named, reason = flex_options.backend_and_reason(on_cuda(built))
    assert named == backend and why in reason
    assert f", backend {backend}: " in choose.choose(on_cuda(built), "flex").reason
    if not grad:
        assert "backend C++: compiled for the CPU" in choose.choose(built, "flex").reason


def test_deterministic_algorithms_take_another_way_than_atomic_additions():
    by_distance = [on_cuda(problem(name, grad=True)) for name in ("alibi", "t5", "kerple")]
    learned = on_cuda(problem("deberta", grad=True))
    assert choose.why_cannot_run(learned, "flex") is None
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert [choose.why_cannot_run(built, "flex") for built in by_distance] == [None] * 3
        assert "atomically" in str(choose.why_cannot_run(learned, "flex"))
        assert choose.why_cannot_run(on_cuda(problem("deberta")), "flex") is None, (
            "without gradients"
        )
        with pytest.raises(ValueError, match="deterministic algorithms are enabled"):
            choose.choose(learned, "flex")
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture
def compiler():
    torch.compiler.reset()
    flex._compiled_flex.cache_clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@needs_inductor
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "name",
    [
        "t5",
        # each is compiled for 25 seconds
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("alibi+kerple", "alibi", "kerple", "deberta")
        ),
    ],
)
def test_flex_equals_the_reference(name):
    encoding = posenc.create(name, SHAPE).requires_grad_(False)
    for length in (150, 300):  # a second length is where torch would compile for any
        with torch.no_grad():
            # float32 sums in another order
            torch.testing.assert_close(
                call(encoding, "flex", length=length),
                call(encoding, "reference", length=length),
                rtol=1e-5,
                atol=1e-5,
            )


@pytest.mark.slow
@needs_inductor
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_nothing_is_compiled_again_for_other_numbers(monkeypatch):
    """At the same lengths, because the CPU's kernels are compiled for one length."""

    def run(encoding, mask, start):
        built = problem(encoding, mask, 150, 300, start)
        with torch.no_grad():
            got, want = flex.run(built)[0], reference.run(built)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    narrow, wide = (masks.causal & masks.sliding_window(size) for size in (40, 90))
    for name in ("alibi", "kerple", "sandwich"):  # by two formulas, and from a table
        run(name, masks.causal, 150)
    run("deberta", masks.causal & masks.chunked(64), 150)
    with torch.compiler.set_stance("fail_on_recompile"):
        run(posenc.ALiBi(4), narrow, 77)
        run("kerple", wide, 3)
        run("sandwich", narrow, 3)
        run("deberta", masks.causal & masks.chunked(32), 20)
        monkeypatch.setattr(flex, "_scalar_tensor", lambda value, device: value)
        with pytest.raises(RuntimeError, match="recompile"):
            run("sandwich", narrow, 150)


def call(encoding, impl, grad=False, dtype=torch.float32, length=150):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, length, 16, dtype=dtype, requires_grad=grad and h == 2) for h in (4, 2, 2)
    )
    return attend(q, k, v, encoding, impl=impl)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("alibi", {"grad": True}, "no backward pass on the CPU"),
        ("alibi", {"dtype": torch.float64}, "float32, bfloat16 and float16"),
        ("cope", {}, "whole rows"),
        ("shaw", {}, "reads the attention weights"),
    ],
)
def test_flex_refuses_with_the_reason(name, options, why):
    encoding = posenc.create(name, SHAPE).requires_grad_(False)
    with pytest.raises(ValueError, match=why):
        call(encoding, "flex", **options)


@pytest.mark.parametrize("name", MODS)
def test_a_score_keeps_its_dtype(name):
    """Triton compiles no kernel whose scores turn to float64, as FoX's running sums are."""
    at = torch.tensor(1)
    mod = flex.score_mod(problem(name, q_len=3, kv_len=3))
    assert mod(torch.zeros(()), at, at, at, at).dtype == torch.float32


NEXT_TO_EACH_OTHER = {"BLOCKS_ARE_CONTIGUOUS": True}
SAFE = NEXT_TO_EACH_OTHER | {"ROWS_GUARANTEED_SAFE": True}
SCATTERED = 2 * torch.arange(150)
FEW_QUERIES = {"bwd_num_stages": 1, "bwd_num_warps": 8, "fwd_num_stages": 1}
PAIRS = FEW_QUERIES | {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 2,
    "fwd_num_warps": 8,
}
H100_BYTES, NEEDED_BYTES = 232_448, 245_760
"""Shared memory that a kernel can have on an H100, and that FIRE's needed there with three stages
of 128 by 128 tiles and heads of 64 channels in bfloat16, in Triton's words."""
OPTIONS = {
    "table": ("sandwich", {}, flex_options.TABLE_OPTIONS),
    "formula slower than a table": ("kerple", {}, flex_options.TABLE_OPTIONS),
    "table, whole blocks": (
        "sandwich",
        {"q_len": 256, "kv_len": 256},
        flex_options.TABLE_OPTIONS | NEXT_TO_EACH_OTHER,
    ),
    "formula": ("alibi", {}, flex_options.FORMULA_OPTIONS),
    "formula, whole blocks": (
        "alibi",
        {"q_len": 256, "kv_len": 256},
        flex_options.FORMULA_OPTIONS | SAFE,
    ),
    "formula, learned": (
        "alibi",
        {"q_len": 256, "kv_len": 256, "grad": True},
        flex_options.FORMULA_OPTIONS | SAFE,
    ),
    "formula, float32": ("alibi", {"q_len": 256, "kv_len": 256, "dtype": torch.float32}, SAFE),
    "formula, other card": ("alibi", {"card": (8, 0)}, {}),
    "formula, few queries": ("alibi", {"q_len": 100, "kv_len": 256}, {}),
    "formula, pairs": ("alibi", {"kv_at": SCATTERED}, {}),
    "pairs": ("fire", {"q_len": 256, "kv_len": 256}, PAIRS),
    "pairs, few queries": ("fire", {"q_len": 100, "kv_len": 256}, FEW_QUERIES),
    "difference of a query's number and a key's": ("fox", {}, {}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_gpu_gets_the_options_that_were_measured(case, monkeypatch):
    """With three stages of keys in shared memory an H200 had no room for heads of 64 and a table of
    biases."""
    name, size, options = OPTIONS[case]
    size = dict(size)
    dtype, card = size.pop("dtype", torch.bfloat16), size.pop("card", (9, 0))
    monkeypatch.setattr(flex_options, "_compute_capability", lambda device: card)
    monkeypatch.setattr(flex_options, "_shared_memory_bytes", lambda device: H100_BYTES)
    given = {}
    monkeypatch.setattr(flex, "score_mod", lambda problem: None)
    monkeypatch.setattr(flex, "block_mask", lambda problem: None)
    monkeypatch.setattr(
        flex,
        "_compiled_flex",
        lambda *key: lambda *qkv, **options: given.update(options) or (qkv[0], None),
    )
    built = on_cuda(problem(name, masks.causal, **size), dtype)
    built.q.to = lambda dtype: built.q
    flex.run(replace(built, needs_grad=False))
    assert (given["kernel_options"] or {}) == options


def test_the_bound_of_shared_memory_is_not_below_what_triton_reported():
    built = with_widths(problem("fire", masks.causal, 256, 256), 64)
    assert flex_options._shared_bytes_needed(built, 128, 128, 3) >= NEEDED_BYTES
    assert flex_options._shared_bytes_needed(built, 128, 64, 2) <= H100_BYTES
    both = posenc.Compose(posenc.create("fire", SHAPE), posenc.create("deberta", SHAPE))
    two = with_widths(problem(both, masks.causal, 256, 256), 64)
    assert flex_options._shared_bytes_needed(two, 128, 64, 2) > flex_options._shared_bytes_needed(
        built, 128, 64, 2
    ), "it reads more numbers"


def with_widths(built, width, dtype=torch.bfloat16):
    """Return the attention with heads of this width that claim to be on a GPU."""
    made = on_cuda(built, dtype)
    made.q.shape = (*built.q.shape[:-1], width)
    return replace(made, v=torch.empty(*built.v.shape[:-1], width))


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [48 * 1024, 64 * 1024, 101_376, 166_912, H100_BYTES])
def test_a_bias_of_each_pair_gets_tiles_that_fit_any_gpu(width, dtype, room, monkeypatch):
    """Counted here for one number for each pair: queries, keys, values and the bias."""
    monkeypatch.setattr(flex_options, "_shared_memory_bytes", lambda device: room)
    options = flex_options._options_for_pairs(
        with_widths(problem("fire", None, 256, 256), width, dtype)
    )
    rows, keys, stages = (options[f"fwd_{name}"] for name in ("BLOCK_M", "BLOCK_N", "num_stages"))
    assert (
        flex_options.BLOCK_SIZE % rows == 0
        and flex_options.BLOCK_SIZE % keys == 0
        and min(rows, keys) >= 16
    )
    held = dtype.itemsize * width * (rows + 2 * stages * keys) + 4 * (stages - 1) * rows * keys
    smallest = (rows, keys, stages) == (16, 16, 1)
    assert held <= room or smallest
    assert stages == 2 or width * dtype.itemsize >= 256, "one stage loads nothing ahead"


def test_a_torch_that_does_not_tell_the_shared_memory_gets_the_smallest_tiles(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    options = flex_options._options_for_pairs(with_widths(problem("fire", None, 256, 256), 64))
    assert options["fwd_num_stages"] == 1 and options["fwd_BLOCK_M"] == 16


OUT_OF_ROOM = (
    "No valid triton configs. OutOfMemoryError: out of resource: "
    "triton_tem_fused_flex_attention_0 Required: 245760 Hardware limit:232448 Reducing block sizes "
    "or `num_stages` may help."
)
"""What torch 2.11 said on an H100."""


@pytest.fixture
def no_room(monkeypatch):
    """Let `auto` choose FlexAttention, whose kernel then does not fit the GPU. Return the list of
    calls of the kernel."""
    calls = []

    def fails(*args, **options):
        calls.append(args)
        raise RuntimeError(OUT_OF_ROOM)

    monkeypatch.setattr(flex, "_compiled_flex", lambda *kind: fails)
    monkeypatch.setattr(flex, "_too_large_kernel_keys", set())
    plain = choose._cheapest_choice

    def first_flex(problem):
        can = choose._why_not_flex(problem) is None
        return choose.Choice("flex", "planted") if can else plain(problem)

    monkeypatch.setattr(choose, "_cheapest_choice", first_flex)
    return calls


@pytest.mark.parametrize("name", ["fire", "deberta", "t5"])
def test_a_kernel_that_does_not_fit_the_gpu_is_tried_once(name, no_room):
    encoding = posenc.create(name, SHAPE).requires_grad_(False)
    wanted = call(encoding, "reference")
    for _ in range(2):
        torch.testing.assert_close(call(encoding, "auto"), wanted, rtol=1e-5, atol=1e-5)
    assert len(no_room) == 1
    built = problem(encoding, q_len=150, kv_len=150)
    assert choose.choose(built).impl != "flex"
    assert (
        "more shared memory than the GPU has"
        in choose.reasons_against_others(built, "blocks")["flex"]
    )
    call(posenc.create("kerple", SHAPE).requires_grad_(False), "auto")
    assert len(no_room) == 2, "what one encoding needs says nothing of another"


def test_a_named_flex_whose_kernel_does_not_fit_is_refused_not_replaced(no_room):
    encoding = posenc.create("fire", SHAPE).requires_grad_(False)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot run FIRE: torch could not build its kernel"):
            call(encoding, "flex")
    assert len(no_room) == 1


def test_another_error_of_a_kernel_is_not_hidden(no_room, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(flex, "_compiled_flex", lambda *kind: fails)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        call(posenc.create("fire", SHAPE).requires_grad_(False), "auto")
    assert not flex._too_large_kernel_keys


@pytest.mark.parametrize("mask", [None, masks.causal, masks.causal & masks.sliding_window(40)])
@pytest.mark.parametrize("shift", [0, 1, 127, 128])
def test_options_promise_what_the_blocks_hold(mask, shift):
    """Read from the block masks: a kernel visits blocks with hidden pairs first, in tiles of 64
    keys, then whole ones; for gradients of keys it visits blocks of queries."""
    promised = 0
    for q_len, kv_len in itertools.product((128, 129, 256, 512, 600), (128, 256, 300, 512, 650)):
        built = problem("alibi", mask, q_len, kv_len, shift)
        if not flex_options._visits_visible_keys_in_order(built) or mask is None:
            continue
        promised += 1
        blocks = flex.block_mask(built)
        for side in ("", "full_"):
            for of in ("kv", "q"):
                counts = getattr(blocks, f"{side}{of}_num_blocks")[0, 0]
                index = getattr(blocks, f"{side}{of}_indices")[0, 0]
                for count, visited in zip(counts.tolist(), index.tolist(), strict=True):
                    first = visited[0]
                    assert visited[:count] == list(range(first, first + count))
        for row in range(q_len):
            block = row // flex_options.BLOCK_SIZE
            partial = blocks.kv_num_blocks[0, 0, block] > 0
            visited = blocks.kv_indices if partial else blocks.full_kv_indices
            first = int(visited[0, 0, block, 0]) * flex_options.BLOCK_SIZE
            assert row + shift >= first, "it sees the first key of the first tile"
    assert (promised > 0) == (mask is masks.causal and shift == 0)


def test_the_blocks_of_other_masks_would_break_the_promise():
    """A last block of 88 queries has hidden pairs, and is not next to the diagonal."""
    blocks = flex.block_mask(problem("alibi", masks.causal, 600, 600))
    assert blocks.q_indices[0, 0, 0, :2].tolist() == [0, 4]


def test_a_gpu_runs_narrow_heads_in_another_way():
    """Triton multiplies matrices of at least 16 columns; a model of 8 channels a head failed."""
    built = on_cuda(problem("alibi"))
    narrow = replace(built, v=built.v[..., :8])
    assert choose.why_cannot_run(built, "flex") is None
    assert "at least 16 channels" in str(choose.why_cannot_run(narrow, "flex"))
