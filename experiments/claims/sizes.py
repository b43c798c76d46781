"""Claims about parameters and capacity, and published numbers that nothing here can check."""

from typing import NamedTuple

import torch
from torch import nn

from experiments.claims.claim import OPEN, SOURCE, Claim, Group, Measured, amount

CLAIMS = Group()


def _bert() -> tuple[int, int]:
    """Return the parameters of BERT-base, and of its twelve value projections."""
    with torch.device("meta"):
        parts = [
            nn.Embedding(30522 + 512 + 2, 768),
            nn.LayerNorm(768),
            *(nn.TransformerEncoderLayer(768, 12, 3072) for _ in range(12)),
            nn.Linear(768, 768),  # the pooler
        ]
        one = nn.Linear(768, 768)
    count = sum(p.numel() for part in parts for p in part.parameters())
    return count, 12 * sum(p.numel() for p in one.parameters())


@CLAIMS.add("Sharing K and V takes 110 M parameters to 91 M")
def _shared() -> Measured:
    total, values = _bert()
    text = (
        f"BERT-base has {total / 1e6:.1f} M; without twelve value projections of "
        f"{values / 12:,.0f} each {(total - values) / 1e6:.1f} M"
    )
    return text, round((total - values) / 1e6) == 91


def _asymmetry(form: torch.Tensor) -> float:
    return (form - form.T).abs().max().item()


@CLAIMS.add("Three projections triple the capacity")
def _capacity() -> Measured:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, 8, generator=generator, dtype=torch.float64)
    form, rank = a @ b.T, int(torch.linalg.matrix_rank(a @ b.T))
    text = (
        "capacity has no agreed measure. Scores of a head depend on W_q W_k^T "
        f"alone, of rank {rank} for heads of 8; with one projection for both it is symmetric "
        f"(asymmetry: {amount(_asymmetry(a @ a.T))}, with two {amount(_asymmetry(form))})"
    )
    return text, OPEN


def _published(claim: str, source: str, why: str) -> None:
    """Add a claim about someone else's training run, and why it cannot be checked here."""
    CLAIMS.append(Claim(claim, source, lambda: (why, OPEN)))


class Retold(NamedTuple):
    """Two versions of a fact: the claim's, and the one printed in its source."""

    said: str
    printed: str
    where: str


RETOLD: dict[str, Retold] = {}


def _retold(claim: str, source: str, retold: Retold) -> None:
    """Add a claim that its own source may contradict; both are compared as published."""
    RETOLD[claim] = retold

    def compare() -> Measured:
        said, printed, where = RETOLD[claim]
        same = said == printed
        return f"told as {said}; {where}: {printed}", OPEN if same else SOURCE

    CLAIMS.append(Claim(claim, source, compare))


_retold(
    "EleutherAI's 16.59 on OpenWebText2 is the sinusoidal encoding's",
    "retold from EleutherAI 2021, Rotary Embeddings: A Relative Revolution",
    Retold("16.59, sinusoidal", "16.59, learned absolute", "its table has no sinusoidal row"),
)

_retold(
    "YaRN's Proof-pile tables use a sliding window with stride 256",
    "Peng et al. 2023, arXiv:2309.00071, section 4",
    Retold(
        "a stride of 256",
        "a stride of the whole window, one window for each document",
        "its evaluation script truncates",
    ),
)

_published(
    "Equation 17 of YaRN blends with b'",
    "Peng et al. 2023, arXiv:2309.00071, equation 17",
    "a misprint for b has no measurement; the code uses b, and so does posenc",
)

_retold(
    "DroPE reaches 52.50 on needles at 8 times the length",
    "retold from arXiv:2512.12167",
    Retold("52.50", "52.20", "its table"),
)

_published(
    "HoPE is one method",
    "arXiv:2410.21216; arXiv:2509.05218",
    "a matter of names: high frequencies only, hyperbolic rotations, and a hybrid for "
    "video carry it",
)

_published(
    "Models without positions are slower to train and worse in perplexity",
    "arXiv:2512.12167, theorem 3.4; Haviv et al. 2022, arXiv:2203.16634",
    "needs training runs: `posenc compare nope rope` measures it on your text",
)
