"""inspect.html: the spec sheets, and pictures of what the encodings do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from posenc.embeddings.sinusoidal import Sinusoidal
from posenc.encoding.base import PositionEncoding
from posenc.encoding.distance_bias import DistanceBias
from posenc.inspect.encoding import figures, precision
from posenc.inspect.encoding.layer import first_layer, line
from posenc.inspect.encoding.sheet import SpecSheet
from posenc.inspect.encoding.words import LEGEND, table
from posenc.registry import create
from posenc.report.page import Code, Page, Plot, Table
from posenc.scores.alibi import ALiBi
from posenc.scores.t5 import T5Bias

SHOWN = 128
"""Positions drawn in a heat map."""


def write_page(sheets: Sequence[SpecSheet], path: Path, compare: bool, command: str) -> None:
    """Write the page; with `compare` one table and shared curves, else a section for each."""
    names = ", ".join(sheet.name for sheet in sheets)
    shape = sheets[0].shape
    page = Page(
        "What position does",
        f"{names}: {shape.num_heads} heads of {shape.head_dim}, trained on "
        f"{shape.train_length:,} tokens. Everything here is measured.",
    )
    for group in [sheets] if compare else [[sheet] for sheet in sheets]:
        name = ", ".join(sheet.name for sheet in group)
        measured = Table(["measured", *(sheet.name for sheet in group)], table(group), LEGEND)
        page.section(name, measured, *_shared(group))
        for sheet in group:
            plots = list(_own(sheet))
            if plots:
                page.section(f"Inside {sheet.name}", *plots)
    page.section("How to repeat it", Code(command))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.write(path)


def _shared(sheets: Sequence[SpecSheet]) -> Iterator[Plot]:
    decays = {sheet.name: sheet.decay for sheet in sheets}
    said = "; ".join(
        f"{name} from {_number(d.same[0])} at 0 to {_number(d.same[-1])} at {d.distances[-1]:,}"
        for name, d in decays.items()
    )
    yield Plot(
        figures.score_by_distance(decays, same=True),
        "The score of a random vector with itself, by distance: the mean over vectors and heads.",
        f"Mean score of equal vectors by distance: {said}.",
    )
    yield Plot(
        figures.score_by_distance(decays, same=False),
        "Scores of random queries and keys: mean, and a band that holds nine of ten.",
        "Mean and band of the scores of independent random vectors by distance.",
    )
    waves = {sheet.name: sheet.wavelengths for sheet in sheets if sheet.wavelengths}
    if waves:
        if "rope" not in waves and any(2 in s.places for s in sheets):
            plain = precision.angles_of(create("rope", sheets[0].shape))
            assert plain is not None
            unscaled = [2 * torch.pi / float(f) for f in plain.inv_freq]
            waves = {"rope, unscaled": unscaled, **waves}
        yield Plot(
            figures.wavelengths(waves, sheets[0].shape.train_length),
            "Tokens per turn of each frequency pair. Pairs above the dotted line never complete "
            "a turn in training, and meet new angles beyond it.",
            "Wavelength of each frequency pair on a logarithmic axis, with the training length.",
        )


def _number(value: float | None) -> str:
    return "hidden" if value is None else f"{value:.3g}"


@torch.no_grad()
def _own(sheet: SpecSheet) -> Iterator[Plot]:
    torch.manual_seed(0)
    encoding = first_layer(create(sheet.name, sheet.shape))
    if sheet.precision is not None:
        found = sheet.precision
        reach = {"as used": found.as_used} | {f"plain {n}": p for n, p in found.plain.items()}
        yield Plot(
            figures.precision_map(found.apart, found.starts, reach),
            "Where adjacent positions collide: the share of neighbours whose angles differ at all, "
            "as this encoding computes them and as position times frequency in a dtype. The mark "
            f"in each row is the last position with every angle within {precision.BOUND:g} rad of "
            "exact arithmetic: long before positions collide, their angles are wrong.",
            "; ".join(
                f"{name}: right to {p:,}, neighbours differ up to {_last_apart(found, name)}"
                for name, p in reach.items()
            ),
        )
    if 1 in sheet.places:
        yield from _embedding(encoding, sheet)
    if 2 in sheet.places and sheet.wavelengths:
        yield from _rotation(encoding, sheet)
    if isinstance(encoding, DistanceBias):
        yield from _bias(encoding, sheet)


def _last_apart(found: precision.Precision, name: str) -> str:
    apart = [
        start for start, share in zip(found.starts, found.apart[name], strict=True) if share == 1
    ]
    return f"{apart[-1]:,}" if apart else "none"


def _embedding(encoding: PositionEncoding, sheet: SpecSheet) -> Iterator[Plot]:
    limit = encoding.claims.max_positions
    count = SHOWN if limit is None else min(SHOWN, limit)
    x = torch.zeros(1, count, sheet.shape.embed_dim)
    table = encoding.embed(x, line(encoding, torch.arange(count)))[0].numpy()
    yield Plot(
        figures.heat_map(table, "dimension", "position, tokens", "value added"),
        "What is added to the embeddings.",
        f"Heat map of {table.shape[0]} positions by {table.shape[1]} dimensions.",
    )
    width = table.shape[1]
    picked = sorted({0, width // 4, width // 2, width - 1})
    yield Plot(
        figures.single_lines(table, picked, "position, tokens", "value added", "dimension"),
        "Single dimensions over positions.",
        "One curve for each of four dimensions.",
    )
    rows_picked = sorted({0, 1, count // 2})
    yield Plot(
        figures.single_lines(table.T[:48], rows_picked, "dimension", "value added", "position"),
        "Single positions over the first dimensions.",
        "One curve for each of three positions.",
    )
    unit = torch.nn.functional.normalize(torch.from_numpy(table), dim=-1)
    yield Plot(
        figures.heat_map((unit @ unit.T).numpy(), "position, tokens", "position, tokens", "cosine"),
        "Similarity of positions: the cosine of their vectors."
        + (
            " Distant ones stay similar because slow dimensions barely move."
            if isinstance(encoding, Sinusoidal)
            else ""
        ),
        "Cosine similarity between all pairs of positions.",
    )


def _rotation(encoding: PositionEncoding, sheet: SpecSheet) -> Iterator[Plot]:
    angles = precision.angles_of(encoding)
    assert angles is not None
    steps = torch.arange(SHOWN)
    own = steps[:, None].expand(-1, 1 + max(angles.axes)) if angles.axes else steps
    cos, _ = angles.cos_sin(own)
    yield Plot(
        figures.heat_map(cos.numpy(), "frequency pair", "position, tokens", "cosine of the angle"),
        "How far each pair of channels has turned.",
        "Heat map of the cosine of the angle by position and frequency pair.",
    )
    per_step = float(angles.inv_freq[0]) * 180 / torch.pi
    yield Plot(
        figures.rotation_steps(per_step, 6),
        f"The fastest pair, step by step: {per_step:.1f} degrees for each token.",
        "Six arrows from the centre of a circle, each turned on from the last.",
    )


def _bias(encoding: DistanceBias, sheet: SpecSheet) -> Iterator[Plot]:
    distances = torch.tensor(sheet.decay.distances)
    yield Plot(
        figures.bias_by_distance(encoding.bias(distances).numpy(), sheet.decay.distances),
        "The bias of each head by distance.",
        "One curve per head over the distance to the key.",
    )
    positions = torch.arange(64)
    matrix = encoding(positions, positions)[0].numpy()
    yield Plot(
        figures.heat_map(matrix, "key position", "query position", "bias, logits"),
        "The bias matrix of head 0, before the mask.",
        "Heat map of the bias by query and key position.",
    )
    if isinstance(encoding, ALiBi):
        yield Plot(
            figures.slopes(encoding.slopes),
            "The slope of each head.",
            ", ".join(f"{s:.3g}" for s in encoding.slopes),
        )
    if isinstance(encoding, T5Bias):
        both = torch.arange(200)
        future = encoding.bucket(-both).tolist() if encoding.bidirectional else None
        yield Plot(
            figures.buckets(encoding.bucket(both).tolist(), future),
            "The bucket of each distance: one for each near distance, then wider ones.",
            "A staircase that flattens with distance.",
        )
