"""Define the cases of `posenc bench`, in groups that each answer one question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

GROUPS = {
    "attention": "How much longer does attention take with an encoding?",
    "backward": "How much longer do attention's forward and backward passes take?",
    "memory": "How much memory does attention take beyond its inputs, output and gradients?",
    "layer": "How much longer does a whole attention layer take, with its projections?",
    "rotation": "How long does rotating queries and keys take?",
    "decode": "How long does one token of a model take, with the keys of a long text in its cache?",
    "training": "How long does a training step of a small model take?",
    "attach": "How much longer does transformers' Llama take with an attached encoding?",
}
"""Name of each group of cases, and the question that it answers."""

GROUPS_WITH_TRANSFORMERS = ("decode", "training", "attach")

DISTANCE_BIASES = ("alibi", "t5", "kerple", "sandwich")
CONTENT_ENCODINGS = ("fire", "cope", "shaw", "transformer_xl", "deberta", "fox", "dape")
ENCODINGS = ("nope", "rope", *DISTANCE_BIASES, *CONTENT_ENCODINGS)
PREPARED_RUNS = ("transformer_xl, prepared", "deberta, prepared")
"""Content encodings whose tables are computed before the timed call."""


@dataclass(frozen=True)
class Case:
    """Runs to compare in one process, and the sizes of their tensors.

    Args:
        group: a name of GROUPS.
        runs: names of encodings; in the group `attention` followed by ", prepared" or ", <impl>".
        baselines: names of reference runs; each run's time is divided by theirs.
        q_len, kv_len: numbers of queries and keys; kv_len 0 means q_len. With more keys than
            queries, the queries are the last of the tokens.
        layers: layers of a model; 0: attention only.
        dtype: "bfloat16" means autocast for a model.
        backward: True to compute gradients, too.
        device: "cuda" or "cpu", where attention and rotation run with --device; "" without that
            option: only then have rows no `compiled`, and those of rotations no `gb_per_second`.
    """

    group: str
    runs: tuple[str, ...]
    baselines: tuple[str, ...]
    q_len: int = 1024
    kv_len: int = 0
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    layers: int = 0
    dtype: str = "float32"
    backward: bool = False
    device: str = ""

    @property
    def num_keys(self) -> int:
        """Return the number of keys: kv_len, or q_len where that is 0."""
        return self.kv_len or self.q_len

    @property
    def width(self) -> int:
        """Return the width of the model: query heads times head_dim."""
        return self.heads * self.head_dim

    @property
    def ffn_dim(self) -> int:
        """Return the width inside the feed-forward blocks: 352 for a model of width 128, as in the
        default decoder of posenc compare, and in proportion for others."""
        return self.width * 11 // 4

    @property
    def title(self) -> str:
        """Return the case in a few words, unique in its group."""
        length = _abbreviate_length(self.q_len)
        if self.num_keys != self.q_len:
            length = f"{length} {'query' if self.q_len == 1 else 'queries'}"
            length += f", {_abbreviate_length(self.num_keys)} keys"
        words = [length if self.batch == 1 else f"{self.batch} x {length}"]
        if self.group == "rotation" and self.head_dim != 64:
            words.append(f"heads of {self.head_dim}")
        if self.dtype != "float32":
            words.append(self.dtype)
        if self.backward and self.group in ("memory", "rotation", "attach"):
            words.append("with backward")
        return ", ".join(words)

    @property
    def num_layer_weights(self) -> int:
        """Return the number of weights of all layers of one model."""
        ffn_dim = 0 if self.group == "layer" else self.ffn_dim
        return self.layers * (4 * self.width**2 + 3 * self.width * ffn_dim)

    def flops(self) -> int:
        """Return an estimate of the additions and multiplications of a run without positions."""
        num_tokens = self.batch * self.q_len
        if self.group == "rotation":
            # Forty operations for each channel of queries and keys: chosen, not derived.
            num_operations = 40 * num_tokens * (self.heads + self.kv_heads) * self.head_dim
        else:
            # Two products, q k^T and weights v, each with a multiplication and an addition for
            # every pair and channel. A causal mask hides half of the pairs where q and k are as
            # long.
            num_pairs = num_tokens * self.num_keys // (2 if self.num_keys == self.q_len else 1)
            num_operations = (
                4 * num_pairs * self.width * max(self.layers, 1)
                + 2 * num_tokens * self.num_layer_weights
            )
        # Gradients of both factors of each product take two more products.
        return num_operations * (3 if self.backward else 1)

    def round_seconds(self, num_threads: int, speed: float = 3e10) -> float:
        """Return an estimate of the seconds of a round of all runs.

        speed: operations a second, per thread; the default is chosen, not derived.
        """
        # In times of attention without positions: chosen, not derived.
        relative_cost = sum(
            4 if run.partition(",")[0] in CONTENT_ENCODINGS else 1.3 for run in self.runs
        )
        return self.flops() * (relative_cost + len(self.baselines)) / (speed * num_threads)

    def min_bytes(self) -> int:
        """Return the bytes of inputs, outputs and weights, an estimate of the least memory that
        a run needs."""
        # Models run under autocast in 16 bits: their weights and residual streams stay float32.
        bytes_per_number = 4 if self.dtype == "float32" or self.layers else 2
        num_tokens = self.batch * max(self.q_len, self.num_keys) * max(self.layers, 1)
        # Five tensors of the size of q, of all layers: chosen, not derived.
        num_bytes = (
            5 * bytes_per_number * num_tokens * max(self.heads, self.kv_heads) * self.head_dim
        )
        num_bytes += (
            bytes_per_number * self.num_layer_weights * (len(self.runs) + len(self.baselines))
        )
        # These project the vectors of relative positions by a weight of their own.
        num_projecting = sum(run.startswith(("transformer_xl", "deberta")) for run in self.runs)
        return num_bytes + bytes_per_number * num_projecting * self.width**2


def select_cases(
    groups: Sequence[str],
    lengths: Sequence[int] = (),
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> list[Case]:
    """Return the cases of these groups, with the given sizes instead of their own."""
    case_by_sizes: dict[Case, Case] = {}  # by all but their runs, so that none comes twice
    for case in CASES:
        if case.group not in groups:
            continue
        sized_case = _with_sizes(case, heads, kv_heads, head_dim)
        for length in lengths or (0,):
            if length and sized_case.kv_len:
                sized_case = replace(sized_case, kv_len=length)
            elif length:
                sized_case = replace(sized_case, q_len=length)
            case_by_sizes.setdefault(replace(sized_case, runs=()), sized_case)
    return list(case_by_sizes.values())


def _with_sizes(case: Case, heads: int | None, kv_heads: int | None, head_dim: int | None) -> Case:
    """Return the case with the given sizes in place of its own. Raises: ValueError if the query
    heads are no multiple of the key heads."""
    heads = heads or case.heads
    if not kv_heads:
        # Keys that every head had of its own stay so.
        kv_heads = heads if case.heads == case.kv_heads else case.kv_heads
    if heads % kv_heads:
        raise ValueError(
            f"bench: --heads must be a multiple of --kv-heads, got {heads} and {kv_heads}."
        )
    return replace(case, heads=heads, kv_heads=kv_heads, head_dim=head_dim or case.head_dim)


def device_cases(device: str, lengths: Sequence[int], heads: int, dtype: str) -> list[Case]:
    """Return the cases that measure a device's kernels, length by length, so that a kernel which is
    compiled again at a later length is seen. FlexAttention has no backward pass on the CPU."""
    impls = ("blocks",) if device == "cpu" else ("flex", "blocks")
    runs = tuple(f"{name}, {impl}" for name in ("alibi", "t5") for impl in impls)
    common_fields: dict[str, Any] = {
        "heads": heads,
        "kv_heads": heads,
        "dtype": dtype,
        "device": device,
    }
    rotation_runs = ("interleaved, same positions", "half-split, same positions")
    cases = []
    for length in lengths:
        cases += [
            Case("backward", runs, ("SDPA",), length, backward=True, **common_fields),
            Case("memory", runs, ("SDPA",), length, backward=True, **common_fields),
            Case("rotation", rotation_runs, ("clone",), length, **common_fields),
        ]
    return cases


def _abbreviate_length(length: int) -> str:
    """Return a number of tokens as text, multiples of 1024 with a k: `16k` for 16384, `128`."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


_SDPA_BASELINE = ("SDPA",)
_LAYER_ENCODINGS = ("nope", "rope", "alibi", "t5", "deberta")
_ROTATIONS = ("interleaved", "half-split", "half-split, same positions")
_ROTATION_BASELINES = ("clone", "transformers")
_LLAMAS, _LLAMA_BFLOAT16 = ("Llama, sdpa", "Llama, eager"), "Llama, bfloat16"
# The default decoder of posenc compare and its batch.
_SIZES = {"batch": 32, "heads": 4, "kv_heads": 4, "head_dim": 32, "layers": 4}
_TRAINING_SIZES: dict[str, Any] = {**_SIZES, "backward": True}

# Lengths, batches and heads are chosen, not derived.
CASES = (
    # First, because memory freed by earlier cases is reused: a clone of 32 MiB takes 4 instead of
    # 20 ms.
    Case("rotation", _ROTATIONS, _ROTATION_BASELINES, 1024, heads=32),
    Case("rotation", _ROTATIONS, _ROTATION_BASELINES, 4096, heads=32),
    Case("rotation", _ROTATIONS, _ROTATION_BASELINES, 4096, heads=32, backward=True),
    Case(
        "rotation", _ROTATIONS, _ROTATION_BASELINES, 128, heads=32, dtype="bfloat16", backward=True
    ),
    Case(
        "rotation", _ROTATIONS, _ROTATION_BASELINES, 1024, heads=32, dtype="bfloat16", backward=True
    ),
    Case("rotation", _ROTATIONS, _ROTATION_BASELINES, 4096, heads=32, dtype="bfloat16"),
    Case(
        "rotation", _ROTATIONS, _ROTATION_BASELINES, 4096, heads=32, dtype="bfloat16", backward=True
    ),
    Case("rotation", _ROTATIONS, _ROTATION_BASELINES, 4096, heads=32, head_dim=128),
    Case("rotation", _ROTATIONS, _ROTATION_BASELINES, 16384, heads=32),
    Case("attention", ENCODINGS, _SDPA_BASELINE, 128, batch=8),
    Case("attention", ENCODINGS, _SDPA_BASELINE, 256, batch=8),
    Case("attention", ENCODINGS, _SDPA_BASELINE, 512, batch=8),
    Case("attention", ENCODINGS + PREPARED_RUNS, _SDPA_BASELINE, 1024),
    Case("attention", ENCODINGS, _SDPA_BASELINE, 1024, dtype="bfloat16"),
    Case("attention", DISTANCE_BIASES, _SDPA_BASELINE, 2048),
    Case("attention", DISTANCE_BIASES + CONTENT_ENCODINGS, _SDPA_BASELINE, 4096),
    Case("attention", DISTANCE_BIASES, _SDPA_BASELINE, 8192),
    Case("attention", DISTANCE_BIASES, _SDPA_BASELINE, 16384),
    Case("attention", (*ENCODINGS, "t5, prepared", *PREPARED_RUNS), _SDPA_BASELINE, 1, 4096),
    Case("backward", ("alibi", "t5", *CONTENT_ENCODINGS), _SDPA_BASELINE, 1024, backward=True),
    Case("backward", ("alibi", "t5"), _SDPA_BASELINE, 4096, backward=True),
    Case("memory", DISTANCE_BIASES + CONTENT_ENCODINGS, _SDPA_BASELINE, 8192),
    Case("memory", DISTANCE_BIASES, _SDPA_BASELINE, 8192, backward=True),
    Case("layer", _LAYER_ENCODINGS, ("plain layer",), 128, layers=1),
    Case("layer", _LAYER_ENCODINGS, ("plain layer",), 512, layers=1),
    Case("layer", _LAYER_ENCODINGS, ("plain layer",), 128, batch=32, layers=1),
    Case("decode", ("rope", "alibi", "t5", "rerope"), _LLAMAS, 1, 4096, layers=2),
    Case("training", ("rope", "alibi", "t5"), _LLAMAS, 128, **_TRAINING_SIZES),
    Case(
        "training",
        ("rope", "alibi", "t5", _LLAMA_BFLOAT16),
        _LLAMAS,
        128,
        dtype="bfloat16",
        **_TRAINING_SIZES,
    ),
    Case("attach", ("rope", "alibi", "fox"), ("stock",), 2048, layers=2),
    Case("attach", ("rope", "alibi", "fox"), ("stock",), 2048, layers=2, backward=True),
)
