"""Position ids of a batch against what the families' own code makes."""

import json
import random

import pytest

from posenc.doctor.check_position_ids import compare_position_ids
from posenc.doctor.command import Options
from posenc.runtimes.config_model import model_of
from posenc.runtimes.meaning import UnknownFamilyError
from tests.doctor.judging import run
from tests.doctor.threads import BASE

LLAMA = model_of({**BASE, "rope_theta": 10000.0})
VISION = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}


def model(name):
    text = {"model_type": f"{name}_text", "hidden_size": 64, "num_attention_heads": 4}
    return model_of({"model_type": name, "text_config": text, "vision_config": {}})


def problems(batch, own):
    return compare_position_ids(batch, own).differences


def test_plain_packed_and_padded_text_is_right():
    for batch in (
        {"position_ids": [[0, 1, 2, 3]]},
        {"position_ids": [[0, 1, 2, 0, 1]]},
        {"position_ids": [[0, 1, 2, 0, 1]], "documents": [[7, 7, 7, 8, 8]]},
        {"position_ids": [[9, 9, 0, 1]], "attention_mask": [[0, 0, 1, 1]]},
    ):
        assert problems(batch, LLAMA) == []


@pytest.mark.parametrize(
    "batch, said",
    [
        ({"position_ids": [[0, 1, 3]]}, "row 0: token 2 has the position 3, 2 is made"),
        ({"position_ids": [[0, 1], [1, 2]]}, "row 1: token 0 has the position 1, 0 is made"),
        ({"position_ids": [[0, 1, 2, 3]], "documents": [[7, 7, 8, 8]]}, "token 2 has the posi"),
        ({"position_ids": [[0, 1, 0, 1]], "documents": [[7, 7, 7, 7]]}, "2 of 4 tokens differ"),
        ({"position_ids": [[0, 1, 1, 2]]}, "token 2 has the position 1, 2 is made"),
        ({"position_ids": [[0, 1, 2]], "attention_mask": [[0, 1, 1]]}, "token 1 has the posit"),
    ],
)
def test_a_gap_a_restart_and_padding_that_counts_are_named(batch, said):
    (line,) = problems(batch, LLAMA)
    assert said in line


@pytest.mark.parametrize(
    "batch, said",
    [
        ({}, "position_ids must be lists"),
        ({"position_ids": [0, 1]}, "2 deep"),
        ({"position_ids": [[0, 1.5]]}, "whole numbers"),
        ({"position_ids": [[]]}, "lists"),
        ({"position_ids": [[True]]}, "whole numbers"),
        ({"position_ids": [[0, 1]], "attention_mask": [[1]]}, "rows of other lengths"),
    ],
)
def test_what_is_no_batch_is_refused(batch, said):
    with pytest.raises(ValueError, match=said):
        problems(batch, LLAMA)


def random_batch(draw, split):
    """Token kinds and grids of two rows, padded on the left."""
    kinds, images, videos = [], [], []
    for _ in range(2):
        row = []
        for _ in range(draw.randint(1, 4)):
            row += [0] * draw.randint(1, 5)
            h, w = 2 * draw.randint(1, 3), 2 * draw.randint(1, 3)
            if draw.random() < 0.5:
                images.append([1, h, w])
                row += [1] * (h * w // 4)
            else:
                t = draw.randint(1, 3)
                videos.append([t, h, w])
                for _ in range(t if split else 1):  # Qwen3-VL has words between frames
                    row += [2] * (h * w // 4 * (1 if split else t)) + [0] * split
        kinds.append(row)
    width = max(map(len, kinds))
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in kinds]
    kinds = [[0] * (width - len(row)) + row for row in kinds]
    return kinds, mask, images, videos


def of_paper(kinds, images, videos, framewise):
    """(t, h, w) by arXiv:2409.12191, section 2.1: a modality starts at the largest number before it
    plus 1."""
    images, videos, found, j = [*images], [*videos], [], 0
    while j < len(kinds):
        start = max((max(cell) for cell in found), default=-1) + 1
        if kinds[j] == 0:
            found.append((start,) * 3)
            j += 1
            continue
        grid = (images if kinds[j] == 1 else videos)[0]
        frames = 1 if kinds[j] == 1 or framewise else grid[0]
        for t in range(frames):
            for h in range(grid[1] // 2):
                for w in range(grid[2] // 2):
                    found.append((start + t, start + h, start + w))
        j += frames * grid[1] * grid[2] // 4
        if kinds[j - 1] == 2 and framewise and grid[0] > 1:
            videos[0] = [grid[0] - 1, *grid[1:]]
        else:
            (images if kinds[j - 1] == 1 else videos).pop(0)
    return found


@pytest.mark.parametrize("name", VISION)
def test_m_rope_positions_are_those_of_the_paper(name):
    draw, noted = random.Random(name), 0
    for _ in range(200):
        kinds, mask, images, videos = random_batch(draw, split=name == "qwen3_vl")
        rest = {1: [*images], 2: [*videos]}
        rows = []
        for row, visible in zip(kinds, mask, strict=True):
            own = [kind for kind, seen in zip(row, visible, strict=True) if seen]
            cells = of_paper(own, rest[1], rest[2], name == "qwen3_vl")
            rows.append([(0, 0, 0)] * (len(row) - len(own)) + cells)
            for kind in (1, 2):
                tokens = own.count(kind)
                while tokens:
                    t, h, w = rest[kind].pop(0)
                    tokens -= t * h * w // 4
        batch = {
            "position_ids": [[[cell[a] for cell in row] for row in rows] for a in range(3)],
            "attention_mask": mask,
            "mm_token_type_ids": kinds,
            "image_grid_thw": images or None,
            "video_grid_thw": videos or None,
        }
        differences, notes = compare_position_ids(batch, model(name))
        assert differences == []
        noted += bool(notes)
    assert noted > 20 if name == "qwen2_vl" else not noted


def after_video(first):
    """3 tokens of text, a video of 8 frames of 2 x 2, 2 tokens of text that start at `first`."""
    cells = [(j,) * 3 for j in range(3)]
    cells += [(3 + t, 3 + h, 3 + w) for t in range(8) for h in range(2) for w in range(2)]
    cells += [(first,) * 3, (first + 1,) * 3]
    return {
        "position_ids": [[[cell[a] for cell in cells]] for a in range(3)],
        "mm_token_type_ids": [[0] * 3 + [2] * 32 + [0] * 2],
        "video_grid_thw": [[8, 4, 4]],
    }


def test_text_after_a_video_goes_on_at_the_largest_number_plus_1():
    """Run in transformers 4.57.3: 11; in 5.12.1 and 5.23.0: 5, and 11 for a generated token."""
    differences, (note,) = compare_position_ids(after_video(11), model("qwen2_vl"))
    assert differences == []
    assert "token 35 has (11, 11, 11) in the paper, transformers 4.57 and vLLM 0.33" in note
    assert "(5, 5, 5) in transformers 5.12 to 5.24" in note
    (line,), (note,) = compare_position_ids(after_video(5), model("qwen2_vl"))
    assert "token 35 has the position (5, 5, 5), (11, 11, 11) is made by the paper" in line
    assert "these are the numbers of transformers 5.12 to 5.24, whose own decoding" in note
    (line,), (note,) = compare_position_ids(after_video(4), model("qwen2_vl"))
    assert "(4, 4, 4), (11, 11, 11)" in line and "runtimes differ after a video" in note


def test_the_paper_s_numbers_are_those_of_mrope_positions():
    posenc = pytest.importorskip("posenc")
    got = posenc.mrope_positions([3, (8, 2, 2), 2]).T.tolist()
    assert [axis[0] for axis in after_video(11)["position_ids"]] == got


@pytest.mark.parametrize("name", VISION)
def test_m_rope_positions_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    import importlib
    from types import SimpleNamespace

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    real = getattr(module, f"{VISION[name]}Model")
    shell = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    )
    shell.get_vision_position_ids = lambda *a, **k: real.get_vision_position_ids(shell, *a, **k)
    draw, tensor = random.Random(name), torch.tensor
    for _ in range(20):
        kinds, mask, images, videos = random_batch(draw, split=name == "qwen3_vl")
        wanted, _ = real.get_rope_index(
            shell,
            torch.zeros(len(kinds), len(kinds[0]), dtype=torch.long),
            tensor(kinds),
            tensor(images) if images else None,
            tensor(videos) if videos else None,
            attention_mask=tensor(mask),
        )
        batch = {
            "position_ids": wanted.tolist(),
            "attention_mask": mask,
            "mm_token_type_ids": kinds,
            "image_grid_thw": images or None,
            "video_grid_thw": videos or None,
        }
        differences, notes = compare_position_ids(batch, model(name))
        assert len(differences) == sum("these are the numbers" in note for note in notes)
        at = mask[1].index(1)
        batch["position_ids"][draw.randrange(3)][1][at + draw.randrange(sum(mask[1]))] += 1
        changed, notes = compare_position_ids(batch, model(name))
        assert any("row 1: " in line for line in changed)
        assert not any("row 1: these" in note for note in notes)


def test_grids_that_do_not_fit_are_refused():
    batch = {"position_ids": [[[0, 1]]] * 3, "mm_token_type_ids": [[1, 1]]}
    with pytest.raises(ValueError, match="have no grid"):
        problems(batch, model("qwen2_vl"))
    with pytest.raises(ValueError, match="a grid of 1"):
        problems({**batch, "image_grid_thw": [[1, 8, 8]]}, model("qwen2_vl"))


def test_packed_documents_start_again_with_their_images():
    kinds, document = [0, 1, 0], [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    batch = {
        "position_ids": [[[token[a] for token in document * 2]] for a in range(3)],
        "mm_token_type_ids": [kinds * 2],
        "documents": [[5, 5, 5, 6, 6, 6]],
        "image_grid_thw": [[1, 2, 2]] * 2,
    }
    assert problems(batch, model("qwen2_vl")) == []
    (line,) = problems({**batch, "documents": [[5] * 6]}, model("qwen2_vl"))
    assert "token 3 has the position (0, 0, 0), (3, 3, 3) is made" in line


def test_what_is_not_looked_at_is_refused():
    batch = {"position_ids": [[[0, 1]]] * 3, "mm_token_type_ids": [[0, 0]]}
    with pytest.raises(ValueError, match="1 grids of the kind 1 have no tokens"):
        problems({**batch, "image_grid_thw": [[1, 2, 2]]}, model("qwen2_vl"))
    vision = {"spatial_merge_size": 0}
    broken = model_of({**BASE, "model_type": "qwen2_vl_text", "vision_config": vision})
    with pytest.raises(ValueError, match="spatial_merge_size must be an integer above 0, got 0"):
        problems(batch, broken)
    for key, value in (("mm_token_type_ids", [[0, 1]]), ("image_grid_thw", [[1, 2, 2]])):
        for other in (LLAMA, model("qwen2_5_vl")):
            with pytest.raises(UnknownFamilyError, match=f"which {key} asks for"):
                problems({"position_ids": [[0, 1]], key: value}, other)


def test_the_command(tmp_path):
    config, batch = tmp_path / "config.json", tmp_path / "batch.json"
    config.write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    batch.write_text(json.dumps({"position_ids": [[0, 1, 2]]}))
    said, code = run(Options((config,), positions=batch))
    assert code == 0 and "as the code of llama makes them" in said
    batch.write_text(json.dumps({"position_ids": [[0, 1, 3]]}))
    said, code = run(Options((config,), positions=batch))
    assert code == 1 and "row 0: token 2" in said
    config.write_text(json.dumps({**BASE, "model_type": "lama"}))
    assert run(Options((config,), positions=batch))[1] == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file or folder"),
        ("", "not valid JSON"),
        ("[1]", "expected a JSON object, got a list"),
        ('{"position_ids": 3}', "lists of whole numbers, 2 deep, got 3"),
        ('{"position_ids": [[0, 1.5]]}', "2 deep, got [[0, 1.5]]"),
        ('{"position_ids": [[0]], "documents": [[0, 1]]}', "documents has rows of other lengths"),
        ('{"position_ids": [[0]], "mm_token_type_ids": [[0]]}', "does not know the (t, h, w)"),
    ],
)
def test_every_error_about_a_batch_names_its_file(call, tmp_path, content, words):
    config, batch = tmp_path / "config.json", tmp_path / "batch.json"
    config.write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    if content is not None:
        batch.write_text(content)
    code, out, err = call("doctor", config, "--positions", batch)
    assert code == (3 if "(t, h, w)" in words else 2)
    said = out + err
    assert said.count("\n") == 1 and f"{batch}: " in said and words in said
    assert "Errno" not in said
