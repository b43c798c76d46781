"""Masks against the masks of Hugging Face, attention-gym, Gemma, UniLM and XLNet."""

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc import Mask, masks
from posenc.attend.choose import WAYS
from posenc.positions import documents_from_positions, positions_from_documents, positions_from_mask
from tests.attending import attend
from tests.golden_values import Case, cases


def dense(mask: Mask, q_positions: Tensor, kv_positions: Tensor | None = None) -> Tensor:
    kv_positions = q_positions if kv_positions is None else kv_positions
    q_len, kv_len = q_positions.shape[-1], kv_positions.shape[-1]
    seen = mask.bind(q_positions, kv_positions).rows(1, 1, 0, q_len, kv_len, torch.device("cpu"))
    return seen.expand(1, 1, q_len, kv_len)[0, 0]


def hugging_face(case: Case) -> Mask:
    kind, params, inputs = case.params["kind"], case.params, case.inputs
    match kind:
        case "causal":
            return masks.causal
        case "sliding_window":
            return masks.causal & masks.sliding_window(params["window"])
        case "sliding_window_bidirectional":
            return masks.sliding_window(params["window"] + 1)
        case "chunked":
            return masks.causal & masks.chunked(params["chunk"])
        case "packed":
            return masks.causal & masks.document(inputs["document"])
        case "blockwise":
            block = inputs["block"]
            return masks.causal | masks.document(block) & masks.padding(block[None] >= 0)
    raise ValueError(f"mask_hf has a kind this test does not know: {kind}")


@pytest.mark.parametrize("case", cases("mask_hf"))
def test_masks_are_hugging_faces(case: Case):
    shift = case.params.get("left_padding", 0)
    q, kv = case.inputs["q_positions"] - shift, case.inputs["kv_positions"] - shift
    case.assert_close("mask", dense(hugging_face(case), q, kv))


@pytest.mark.parametrize("case", cases("mask_hf_packed_positions"))
def test_documents_are_read_from_positions(case: Case):
    positions = case.inputs["position_ids"].flatten()
    documents = documents_from_positions(positions)
    case.assert_close("packed_index", documents.view(case.expected["packed_index"].shape))
    index = torch.arange(len(positions))
    got = dense(masks.causal & masks.document(documents), index)
    case.assert_close("mask", got.view(case.expected["mask"].shape))
    assert torch.equal(positions_from_documents(documents), positions)


@pytest.mark.parametrize("case", cases("mask_document"))
def test_document_mask_is_attention_gyms(case: Case):
    lengths = case.inputs["lengths"]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    inner = masks.causal | masks.prefix(case.params["prefix_length"])
    positions = positions_from_documents(documents)
    case.assert_close("mask", dense(masks.document(documents) & inner, positions))


@pytest.mark.parametrize("case", cases("mask_prefix_lm"))
def test_prefix_mask_is_attention_gyms(case: Case):
    mask = masks.causal | masks.prefix(case.params["prefix_length"])
    case.assert_close("mask", dense(mask, case.inputs["q_positions"], case.inputs["kv_positions"]))


@pytest.mark.parametrize("case", cases("mask_unilm"))
def test_prefix_mask_is_unilms(case: Case):
    p = case.params
    source, total = p["len_a"] + 2, p["len_a"] + p["len_b"] + 3  # [CLS] A [SEP] B [SEP]
    index = torch.arange(p["max_len"])
    valid = (index < total)[None]
    text = masks.causal & masks.padding(valid) & masks.document((index >= total).long())
    mask = text | masks.prefix(source) if p["mode"] == "s2s" else text
    case.assert_close("mask", dense(mask, index))


@pytest.mark.parametrize("case", cases("mask_gemma_sliding"))
def test_sliding_window_is_gemmas(case: Case):
    q, kv = case.inputs["q_positions"], case.inputs["kv_positions"]
    window = masks.sliding_window(case.params["window"])
    case.assert_close("sliding", dense(window, q, kv))
    case.assert_close("causal", dense(window & masks.causal, q, kv))


@pytest.mark.parametrize("case", cases("mask_xlnet_permutation"))
def test_permutation_mask_is_xlnets(case: Case):
    """XLNet has one matrix for both streams: its rows of tokens that are not predicted hold what
    those tokens' content stream sees."""
    tokens = case.inputs["inputs"]
    special = (tokens == 3) | (tokens == 4)  # CLS and SEP
    given = ~case.inputs["is_masked"] & ~special
    order = case.expected["factorization_index"].masked_fill(given, -1)
    index = torch.arange(len(tokens))
    query = dense(masks.permutation(rank=order, stream="query"), index)
    content = dense(masks.permutation(rank=order, stream="content"), index)
    got = torch.where(case.expected["target_mask"][:, None], query, content)
    case.assert_close("perm_mask", ~got)
    itself = torch.eye(len(tokens), dtype=torch.bool)
    assert torch.equal(content, query | itself)


def test_attention_sinks_show_the_first_tokens_and_the_window():
    seen = dense(masks.attention_sinks(2, 3), torch.arange(8))
    assert seen[7].tolist() == [True, True, False, False, False, True, True, True]
    assert torch.equal(seen, seen.tril())


def test_prefix_may_differ_between_rows():
    mask = (masks.causal | masks.prefix(torch.tensor([0, 2]))).bind(
        torch.arange(3), torch.arange(3)
    )
    seen = mask.rows(2, 1, 0, 3, 3, torch.device("cpu"))
    assert seen[:, 0, 0].tolist() == [[True, False, False], [True, True, False]]


def test_positions_from_mask_count_real_tokens():
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert positions_from_mask(valid).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0]]
    roberta = positions_from_mask(valid, start=2)  # padding_idx 1
    assert roberta.tolist() == [[1, 1, 2, 3, 4], [2, 3, 4, 1, 1]]


def test_positions_from_documents_in_a_batch():
    documents = torch.tensor([[7, 7, 3, 3, 3], [0, 1, 1, 2, 0]])
    assert positions_from_documents(documents).tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 0]]


def test_masks_compare_positions_and_not_places_in_memory():
    positions = torch.tensor([2, 0, 1])
    assert dense(masks.causal, positions).tolist() == [
        [True, True, True],
        [False, True, False],
        [False, True, True],
    ]


@pytest.mark.parametrize("impl", sorted({*WAYS} - {"flex"}))
def test_a_blind_row_gives_zeros_and_zero_gradient(impl: str):
    """FlexAttention is left out: it has no backward pass on the CPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))
    valid = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 0]])
    mask = masks.causal & masks.padding(valid)  # row 0: the first three queries see nothing
    out = attend(q, k, v, None, torch.arange(6), mask=mask, impl=impl)
    assert isinstance(out, Tensor)
    assert (out[0, :, :3] == 0).all() and (out[0, :, 3:] != 0).all()
    grads = torch.autograd.grad((out + out.square()).sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, :, :3] == 0).all(), "queries that see nothing"
    for grad in grads[1:]:
        assert (grad[~valid.bool()[:, None].expand(2, 2, 6)] == 0).all(), "keys nobody sees"
        assert (grad[valid.bool()[:, None].expand(2, 2, 6)] != 0).any()


def test_flex_attention_takes_a_bound_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    valid = torch.ones(2, 256, dtype=torch.bool)
    valid[1, :200] = False
    positions = torch.arange(256)
    for mask in (
        masks.causal & masks.sliding_window(50),
        masks.causal & masks.padding(valid),
        masks.causal | masks.prefix(7),
        masks.causal & masks.document(positions // 100),
    ):
        bound = mask.bind(positions, positions)
        blocks = create_block_mask(bound, 2, None, 256, 256, device="cpu", BLOCK_SIZE=64)
        dense = bound.rows(2, 1, 0, 256, 256, torch.device("cpu")).expand(2, 1, 256, 256)
        tiles = dense.unflatten(-1, (4, 64)).unflatten(-3, (4, 64)).any(-1).any(-2)
        assert torch.equal(blocks.to_dense().bool(), tiles)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.sliding_window(0), "got 0"),
        (lambda: masks.prefix(-1), "got -1"),
        (lambda: masks.prefix(torch.zeros(2, 3)), r"\(2, 3\)"),
        (lambda: masks.chunked(0), "got 0"),
        (lambda: masks.padding(torch.ones(3)), r"\(3,\)"),
        (lambda: masks.permutation(stream="query"), "one of order= and rank="),
        (lambda: masks.permutation(order=torch.tensor([1, 2, 3]), stream="query"), "from 0 to 2"),
        (lambda: masks.permutation(order=torch.tensor([0, 0, 2]), stream="query"), "from 0 to 2"),
        (lambda: masks.permutation(rank=torch.arange(3), stream="both"), "both"),
    ],
)
def test_wrong_arguments_are_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_order_is_not_taken_for_its_ranks():
    order, index = torch.tensor([2, 0, 1, 3]), torch.arange(4)
    by_order = dense(masks.permutation(order=order, stream="query"), index)
    for place, token in enumerate(order.tolist()):
        assert set(by_order[token].nonzero()[:, 0].tolist()) == set(order[:place].tolist())
    ranks = dense(masks.permutation(rank=order.argsort(), stream="query"), index)
    assert torch.equal(by_order, ranks)
    assert not torch.equal(by_order, dense(masks.permutation(rank=order, stream="query"), index))
    with pytest.raises(TypeError, match="without a name"):
        masks.permutation(order, stream="query")  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_distances_of_small_integers_do_not_wrap(dtype):
    positions = torch.arange(100)
    mask = masks.sliding_window(4) | masks.prefix(1)
    assert torch.equal(dense(mask, positions.to(dtype)), dense(mask, positions))


@pytest.mark.parametrize("wrong", [2.5, 3.0, None, "4"])
def test_sizes_are_whole_numbers(wrong):
    with pytest.raises(TypeError, match=f"window_size must be a whole number, got {wrong!r}"):
        masks.sliding_window(wrong)
    with pytest.raises(TypeError, match=f"length must be a whole number, got {wrong!r}"):
        masks.prefix(wrong)


def test_sizes_may_be_numbers_of_numpy():
    positions, three = torch.arange(9), np.int64(3)
    for kind in (masks.sliding_window, masks.chunked):
        assert torch.equal(dense(kind(three), positions), dense(kind(3), positions))


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask: mask and masks.document(torch.zeros(3)),
        lambda mask: mask or masks.full,
        lambda mask: not mask,
        lambda mask: 1 if mask else 2,
    ],
)
@pytest.mark.parametrize("mask", [masks.causal, masks.causal & masks.full, ~masks.causal])
def test_a_mask_is_neither_true_nor_false(ask, mask):
    with pytest.raises(TypeError, match=r"Join masks by &, \| and ~ instead of and, or and not"):
        ask(mask)


ADDED = {
    "infinite": torch.tensor([[-torch.inf, -torch.inf, 0.0, 0.0]]),
    "lowest": torch.tensor([[torch.finfo(torch.bfloat16).min, 0.0]], dtype=torch.bfloat16),
    "whole": torch.tensor([[0, -10000]]),
    "NaN": torch.tensor([[torch.nan, 1.0]]),
}


@pytest.mark.parametrize("read", [masks.padding, positions_from_mask])
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_a_mask_that_is_added_to_scores_is_not_read_as_valid_tokens(read, added):
    with pytest.raises(ValueError, match=r"where 0 marks tokens. Give mask == 0"):
        read(added)
    read(added == 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_valid_tokens_of_any_dtype(dtype):
    valid = torch.tensor([[0, 1, 1]]).to(dtype)
    assert masks.padding(valid).tensor(3).tolist() == [[False, True, True]] * 3
    assert positions_from_mask(valid).tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: masks.document([0, 0, 1]), "document: q_documents must be a tensor"),
        (lambda: masks.document(torch.zeros(2), (0, 1)), "document: kv_documents must be a"),
        (lambda: masks.padding([[0, 1]]), "padding: valid must be a tensor of booleans"),
        (lambda: masks.padding(np.ones((1, 2))), "padding: valid must be a tensor of booleans"),
        (lambda: masks.permutation(order=[1, 0], stream="query"), "permutation: order must be a"),
        (lambda: masks.permutation(rank=[1, 0], stream="query"), "permutation: rank must be a"),
        (lambda: positions_from_mask([[0, 1]]), "positions_from_mask: valid must be a tensor"),
        (lambda: positions_from_documents([0, 1]), "positions_from_documents: documents must be"),
        (lambda: documents_from_positions(range(3)), "documents_from_positions: positions must be"),
    ],
)
def test_lists_are_answered_by_what_to_give(call, said):
    with pytest.raises(TypeError, match=said):
        call()
