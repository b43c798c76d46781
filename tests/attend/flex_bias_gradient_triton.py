"""Triton's kernel for sums along diagonals, interpreted on the CPU.

Run by test_flex_bias_gradient.py with TRITON_INTERPRET=1.
"""

import itertools

import torch

from posenc import masks
from posenc.attend.ways import flex_bias_gradient as gradient
from posenc.attend.ways import flex_bias_gradient_triton as kernel
from tests.attend.test_flex import problem

SIZES = ((64, 64, 0), (150, 150, 0), (100, 230, 130), (1, 70, 69), (130, 40, -20))
"""Queries, keys, and the position of the first query."""
MASKS = (None, masks.causal, masks.causal & masks.sliding_window(40), masks.sliding_window(70))


def main() -> None:
    for (q_len, kv_len, first), mask, width in itertools.product(SIZES, MASKS, (16, 24, 200)):
        torch.manual_seed(0)
        built = problem("sandwich", mask, q_len, kv_len, first)
        q, grad = (torch.randn(2, 4, q_len, width) for _ in range(2))
        k, v = (torch.randn(2, 2, kv_len, width) for _ in range(2))
        if width == 200 and (mask is None or q_len > 100):
            continue
        row = torch.randn(4, q_len + kv_len - 1)
        lse, delta = torch.randn(2, 4, q_len) + 5, torch.randn(2, 4, q_len)
        lse[:, :, 0] = torch.inf  # a query that sees no key
        gradient.BLOCK_SIZE = kernel.block_size(q, v)
        offsets = gradient._block_offsets(built, gradient.BLOCK_SIZE, 10**6)
        tensors = gradient.ScoreInputs(q, k, v, grad, lse, delta, row)
        want = gradient._score_gradients_by_block_offset(built, tensors, offsets)
        got = kernel.diagonal_block_sums(*tensors, built.scale, built.visible_distances, offsets)
        # float32 sums in another order; weights are up to exp of scores, of any size here
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    print("same")


if __name__ == "__main__":
    main()
