"""Apply attention sinks: join the passes of attention, and one logit a head that has no value.

A sink is one more key of its head, with a learned score and the value 0 (gpt-oss; Xiao et al. 2023,
arXiv:2309.17453, give the first tokens that part). It needs no way of computing attention to know
of it: the softmax over the keys and the sink follows from the softmax over the keys, its output and
its log-sum-exp. Passes, which attend to disjoint sets of keys, are joined by the same formula.
"""

from typing import Any

from torch import Tensor

from posenc.attend.ways.flash import join_attention


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise TypeError or ValueError unless sinks are None or one real number for each head of q."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"attention: sinks must be a floating tensor (num_heads,), got {got}.")
    if tuple(sinks.shape) != (q.shape[1],) or sinks.device != q.device:
        raise ValueError(
            f"attention: sinks must be one logit for each of {q.shape[1]} query heads on "
            f"{q.device}, got shape {tuple(sinks.shape)} on {sinks.device}."
        )


def merge_passes_and_sinks(
    results: list[tuple[Tensor, Any]], sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Join the results of passes, which attend to disjoint sets of keys, and the sinks.

    results: of each pass the output (batch, num_heads, q_len, v_dim), or the weights (batch,
        num_heads, q_len, kv_len), and the log-sum-exp (batch, num_heads, q_len).
    sinks: (num_heads,) or None; each is one more key of its head, with this score and a value of 0.
    """
    if sinks is not None:
        out, lse = results[0]
        sink_out = out.new_zeros(())  # the value 0 of a sink, or its column, which is left out
        sink_lse = sinks[:, None].to(lse.dtype).expand_as(lse)
        results = [*results, (sink_out, sink_lse)]
    return join_attention(results)
