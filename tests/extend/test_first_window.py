"""What is said after the first window: a text that the model does not know, and the time."""

import json

import pytest

from posenc.extend import extension
from posenc.extend.measure import first_window
from tests.hf_models import LENGTH, WORDS, save

TARGET = 4 * LENGTH
QUICK = ("--windows", 2, "--task", "none", "--bytes")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>".join(WORDS))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("first") / "llama")


def test_a_text_that_the_model_does_not_know_stops_after_the_first_window(
    folder, text, tmp_path, call, monkeypatch
):
    monkeypatch.setattr(first_window, "UNREADABLE_LOSS", 1.0)
    measured = []
    plain = extension.measure_variant
    monkeypatch.setattr(
        extension, "measure_variant", lambda *given: measured.append(1) or plain(*given)
    )
    asked = ("extend", folder, "--to", TARGET, "--method", "ntk", *QUICK)
    for given, advice in ((("--text", text), "Check that it is"), ((), "Give --text with")):
        code, out, err = call(*asked, *given, "--out", tmp_path / "out")
        assert (code, out) == (2, "") and not measured
        assert "the model does not know this text: its perplexity is 2" in err
        assert advice in err and "--anyway" in err and len(err.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()
    code, _, err = call(*asked, "--text", text, "--anyway", "--out", tmp_path / "out")
    assert code == 0 and measured and "Written and proved" in err


def test_the_time_is_said_before_anything_is_measured(folder, text, call):
    code, _, err = call("extend", folder, "--to", TARGET, "--method", "ntk", *QUICK, "--text", text)
    assert code == 0
    assert "without tasks, from the first window: 3 variants" in err.splitlines()[0]


def test_a_base_is_written_as_people_write_it(tmp_path, text, call):
    """10000 x 16^(8/6) would be 403174.7359...; with one more pair it is a whole number."""
    folder = save("llama", tmp_path / "model", head_dim=4)
    asked = ("--to", 4 * LENGTH, "--method", "ntk", *QUICK, "--text", text)
    code, _, err = call("extend", folder, *asked, "--out", tmp_path / "out")
    assert code == 0, err
    written = (tmp_path / "out" / "config.json").read_text()
    assert '"rope_theta": 160000.0' in written  # 10000 x 4^(4 / 2), in floats 159999.99999999997


def test_a_trained_length_is_taken_in_place_of_that_of_the_config(folder, text, tmp_path, call):
    given = ("--method", "yarn", *QUICK, "--text", text, "--trained-length", LENGTH // 2)
    code, _, err = call("extend", folder, "--to", TARGET, *given, "--out", tmp_path / "out")
    assert code == 0, err
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert rope["original_max_position_embeddings"] == LENGTH // 2
    assert rope["factor"] == TARGET / (LENGTH // 2)
    # Beyond the true length, though not beyond the config's.
    code, _, err = call("extend", folder, "--to", LENGTH, *given)
    assert code == 0, err


def test_a_trained_length_that_cannot_be_is_refused(folder, tmp_path, call):
    code, _, err = call("extend", folder, "--to", TARGET, "--trained-length", 2 * LENGTH)
    assert code == 2 and f"--trained-length {2 * LENGTH} is beyond the {LENGTH} tokens" in err
    gpt2 = save("gpt2", tmp_path / "gpt2")
    code, _, err = call("extend", gpt2, "--to", TARGET, "--trained-length", LENGTH // 2)
    assert code == 2 and "the rows of this model's table of positions" in err
