"""Compare a batch's position ids with those that the family's own code makes.

Text counts on from 0, starts again with each packed document, and is not looked at under padding.
Qwen2-VL and Qwen3-VL give every token three numbers (t, h, w), which are equal in text.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from posenc.dialects.meaning import UnknownFamilyError
from posenc.dialects.model import Model

MROPE = {"qwen2_vl_text": False, "qwen3_vl_text": True, "qwen3_vl_moe_text": True}
"""Families with (t, h, w) positions -> True if each frame of a video is a grid of its own. Read in
transformers 5.23: get_rope_index in qwen2_vl/modeling_qwen2_vl.py and
qwen3_vl/modeling_qwen3_vl.py."""
TEXT, IMAGE, VIDEO = 0, 1, 2
MULTIMODAL = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
LARGEST = 1 << 24
"""Tokens of a batch."""
Grid = tuple[int, int, int]


def problems(batch: Mapping[str, Any], model: Model) -> list[str]:
    """Return one line per row whose position ids are not what the family's code makes.

    Args:
        batch: `position_ids` as lists, (batch, tokens) or (3, batch, tokens) with M-RoPE; with it
            `attention_mask` and `documents` (one number per token) and, with M-RoPE,
            `mm_token_type_ids` (0 text, 1 image, 2 video), `image_grid_thw`, `video_grid_thw`.

    Raises: UnknownFamilyError for images of a family that posenc has not read; ValueError where the
        batch has not these lists, or they do not fit each other.
    """
    three = model.model_type in MROPE
    if not three and (given := [key for key in MULTIMODAL if batch.get(key) is not None]):
        raise UnknownFamilyError(
            f"posenc does not know the (t, h, w) positions of {model.model_type}, which "
            f"{given[0]} asks for"
        )
    axes = _lists(batch, "position_ids", 3 if three else 2)
    rows = list(zip(*axes, strict=True)) if three else [(row,) for row in axes]
    shape = [len(row[0]) for row in rows]
    masks = _beside(batch, "attention_mask", shape, 1)
    kinds = _beside(batch, "mm_token_type_ids", shape, TEXT)
    documents = _beside(batch, "documents", shape, None)
    grids = {IMAGE: _grids(batch, "image_grid_thw"), VIDEO: _grids(batch, "video_grid_thw")}
    if MROPE.get(model.model_type):
        grids[VIDEO] = iter([(1, h, w) for t, h, w in grids[VIDEO] for _ in range(t)])
    vision = model.config.get("vision_config")
    merge = vision.get("spatial_merge_size", 2) if isinstance(vision, Mapping) else 2
    if type(merge) is not int or merge < 1:
        raise ValueError(
            f"config.json: spatial_merge_size must be an integer above 0, got {merge!r}."
        )
    found = []
    for i, (row, mask, kind, ids) in enumerate(zip(rows, masks, kinds, documents, strict=True)):
        seen = [j for j, visible in enumerate(mask) if visible]
        got = [tuple(axis[j] for axis in row) for j in seen]
        if three:
            wanted = []
            for _, own in groupby([(ids[j], kind[j]) for j in seen], lambda token: token[0]):
                wanted += _mrope([of_token for _, of_token in own], grids, merge)
        else:
            named = None if ids[0] is None else [ids[j] for j in seen]
            wanted = _text([p for (p,) in got], named)
        found += _differences(i, seen, got, wanted)
    for kind, rest in grids.items():
        if left := len(list(rest)):
            raise ValueError(f"{left} grids of the kind {kind} have no tokens.")
    return found


def _text(got: list[int], documents: list[Any] | None) -> list[tuple[int, ...]]:
    """Return positions that count on, and start again with a document: where its number changes,
    or at a 0 if no numbers are given."""
    wanted, position = [], 0
    for j, own in enumerate(got):
        again = own == 0 if documents is None else j and documents[j] != documents[j - 1]
        position = 0 if again else position
        wanted.append((position,))
        position += 1
    return wanted


def _mrope(kinds: list[int], grids: Mapping[int, Iterator[Grid]], merge: int) -> list[Any]:
    """Return (t, h, w) of each token: text has three equal numbers, an image or a video its grid,
    and what follows goes on after the largest of its sides."""
    wanted: list[Any] = []
    position = 0
    for kind, group in groupby(kinds):
        count = len(list(group))
        if kind == TEXT:
            wanted += [(position + j,) * 3 for j in range(count)]
            position += count
            continue
        while count > 0:
            grid = next(grids[kind], None) if kind in grids else None
            if grid is None:
                raise ValueError(f"{count} tokens of the kind {kind} have no grid.")
            t, h, w = grid[0], grid[1] // merge, grid[2] // merge
            if not 0 < t * h * w <= count:
                raise ValueError(
                    f"a grid of {t} * {h} * {w} tokens, with {count} of the kind {kind} in a row."
                )
            cells = ((a, b, c) for a in range(t) for b in range(h) for c in range(w))
            wanted += [(position + a, position + b, position + c) for a, b, c in cells]
            position += max(grid[1], grid[2]) // merge
            count -= t * h * w
    return wanted


def _differences(row: int, seen: list[int], got: list[Any], wanted: list[Any]) -> list[str]:
    wrong = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
    if not wrong:
        return []
    first = wrong[0]
    ours, theirs = (v[first][0] if len(v[first]) == 1 else v[first] for v in (got, wanted))
    return [
        f"row {row}: token {seen[first]} has the position {ours}, {theirs} is made by the family's "
        f"code; {len(wrong)} of {len(got)} tokens differ"
    ]


def _lists(batch: Mapping[str, Any], name: str, depth: int) -> list[Any]:
    """Return nested lists of whole numbers of one depth. Raises: ValueError for anything else."""
    value: Any = batch.get(name)
    level = [value]
    wrong = f"{name} must be lists of whole numbers, {depth} deep, got {str(value)[:40]}."
    for _ in range(depth):
        if not all(isinstance(part, list) and part for part in level):
            raise ValueError(wrong)
        level = [item for part in level for item in part]
    if len(level) > LARGEST or not all(type(item) is int for item in level):
        raise ValueError(wrong)
    if depth == 3 and (len(value) != 3 or len({tuple(map(len, axis)) for axis in value}) > 1):
        raise ValueError(f"{name} must have three equal parts, t, h and w.")
    return value


def _beside(batch: Mapping[str, Any], name: str, shape: list[int], usual: Any) -> list[Any]:
    if batch.get(name) is None:
        return [[usual] * count for count in shape]
    value = _lists(batch, name, 2)
    if [len(row) for row in value] != shape:
        raise ValueError(f"{name} has rows of other lengths than position_ids.")
    return value


def _grids(batch: Mapping[str, Any], name: str) -> Iterator[Grid]:
    value = [] if batch.get(name) is None else _lists(batch, name, 2)
    if not all(len(grid) == 3 and min(grid) > 0 for grid in value):
        raise ValueError(f"{name} must have (t, h, w) of each, above 0.")
    return iter([tuple(grid) for grid in value])
