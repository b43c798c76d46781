"""Position ids of a batch against what the families' own code makes."""

import json
import random

import pytest

from posenc.dialects.meaning import UnknownFamilyError
from posenc.dialects.model import model_of
from posenc.dialects.position_ids import problems
from posenc.doctor.options import Options
from posenc.doctor.running import run
from tests.doctor.threads import BASE

LLAMA = model_of({**BASE, "rope_theta": 10000.0})
VISION = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}


def model(name):
    text = {"model_type": f"{name}_text", "hidden_size": 64, "num_attention_heads": 4}
    return model_of({"model_type": name, "text_config": text, "vision_config": {}})


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
        ({}, "position_ids must be lists"), ({"position_ids": [0, 1]}, "2 deep"),
        ({"position_ids": [[0, 1.5]]}, "whole numbers"), ({"position_ids": [[]]}, "lists"),
        ({"position_ids": [[True]]}, "whole numbers"),
        ({"position_ids": [[0, 1]], "attention_mask": [[1]]}, "rows of other lengths"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("name", VISION)
def test_m_rope_positions_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    import importlib
    from types import SimpleNamespace

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    real = getattr(module, f"{VISION[name]}Model")
    shell = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(
        spatial_merge_size=2)))  # fmt: skip
    shell.get_vision_position_ids = lambda *a, **k: real.get_vision_position_ids(shell, *a, **k)
    draw, tensor = random.Random(name), torch.tensor
    for _ in range(20):
        kinds, mask, images, videos = random_batch(draw, split=name == "qwen3_vl")
        wanted, _ = real.get_rope_index(
            shell, torch.zeros(len(kinds), len(kinds[0]), dtype=torch.long), tensor(kinds),
            tensor(images) if images else None, tensor(videos) if videos else None,
            attention_mask=tensor(mask),
        )  # fmt: skip
        batch = {
            "position_ids": wanted.tolist(), "attention_mask": mask, "mm_token_type_ids": kinds,
            "image_grid_thw": images or None, "video_grid_thw": videos or None,
        }  # fmt: skip
        assert problems(batch, model(name)) == []
        at = mask[1].index(1)
        batch["position_ids"][draw.randrange(3)][1][at + draw.randrange(sum(mask[1]))] += 1
        assert len(problems(batch, model(name))) == 1


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
        "mm_token_type_ids": [kinds * 2], "documents": [[5, 5, 5, 6, 6, 6]],
        "image_grid_thw": [[1, 2, 2]] * 2,
    }  # fmt: skip
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
