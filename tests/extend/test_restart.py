"""State of a killed search or tuning: resumed if complete and fitting, otherwise reported."""

import dataclasses
import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from posenc import extend as hf
from posenc.extend.frequency_search import FrequencySearch
from posenc.extend.measure.losses import LossReader
from posenc.extend.methods import METHODS, stretch
from posenc.extend.options import Options
from posenc.hf import tuning
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.model_rotation import settings_applied
from posenc.hf.restart_state import default_state_folder, folder_locked
from posenc.hf.teacher import Teacher
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import TUNING_STATE_FILE
from tests.hf_models import LENGTH, OTHERS, save
from tests.hf_models import WORDS as DOCUMENTS

TARGET = 3 * LENGTH
CONFIG = TuneConfig(5, batch=2, lr=1e-2)


def windows(seed: int = 0, length: int = TARGET) -> Windows:
    tokens = torch.randint(0, 256, (4, length), generator=torch.Generator().manual_seed(seed))
    return Windows(tokens, torch.arange(4)[:, None].expand(4, length))


class Tuning:
    """A tuning of a checkpoint that may be stopped after a step, and what it did."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder, self.state, self.steps = folder, state, 0

    def run(
        self,
        stop: int | None = None,
        *,
        text: Windows | None = None,
        config: TuneConfig = CONFIG,
        method: str = "ntk",
        target: int = TARGET,
        **options,
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        checkpoint = load_checkpoint(self.folder)
        model = checkpoint.model
        self.steps = 0

        def progress(what: str, share: float) -> None:
            self.steps += what != "tuning"  # said before the first step
            if stop is not None and round(share * config.steps) == stop:
                raise KeyboardInterrupt

        settings = stretch(checkpoint.rope_settings, METHODS[method], target)
        with (
            settings_applied(model, settings, target)
            if checkpoint.rope_settings
            else torch.enable_grad()
        ):
            text = windows() if text is None else text
            losses = tuning.tune(model, text, LENGTH, config, self.state, progress, **options)
            return losses, {name: p.detach().clone() for name, p in model.state_dict().items()}

    def stop_after(self, step: int, **options) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.run(step, **options)


@pytest.fixture(scope="module")
def whole(llama, tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What a tuning that nobody stops gives."""
    return Tuning(llama, tmp_path_factory.mktemp("whole") / "state").run()


@pytest.fixture(scope="module")
def state_of_a_cut(llama, tmp_path_factory) -> Path:
    """The state of the second step, of a tuning that was stopped after its third."""
    state = tmp_path_factory.mktemp("cut") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SAVE_EVERY", 2)
        Tuning(llama, state).stop_after(3)
    return state


@pytest.fixture
def cut(llama, state_of_a_cut, tmp_path, monkeypatch) -> Tuning:
    """A tuning that was stopped after its third step, with the state of its second."""
    monkeypatch.setattr(tuning, "SAVE_EVERY", 2)
    shutil.copytree(state_of_a_cut, tmp_path / "state")
    return Tuning(llama, tmp_path / "state")


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("rank", [None, 2])
def test_a_resumed_tuning_ends_bit_for_bit_where_a_whole_one_does(
    family, rank, tmp_path, monkeypatch
):
    """GPT-2 drops out a tenth of everything."""
    if family == "gpt2" and rank:
        pytest.skip("its projections are no linear layers")
    monkeypatch.setattr(tuning, "SAVE_EVERY", 2)
    sizes = {"n_positions": TARGET} if family in OTHERS else {}
    folder = save(family, tmp_path / family, **sizes)
    config = dataclasses.replace(CONFIG, lora_rank=rank)
    whole, expected = Tuning(folder, tmp_path / "whole").run(config=config)
    resumed = Tuning(folder, tmp_path / "cut")
    resumed.stop_after(3, config=config)
    torch.rand(3)  # another place in torch's own random numbers
    losses, weights = resumed.run(config=config)
    assert resumed.steps == 3
    assert losses == whole
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    before = load_checkpoint(folder).model.state_dict()
    assert weights.keys() == before.keys()
    tuned = {"gpt2": "transformer.h.0.attn.c_attn", "llama": "model.layers.0.self_attn.q_proj"}
    assert not torch.equal(weights[f"{tuned[family]}.weight"], before[f"{tuned[family]}.weight"])


OTHER = {
    "text": {"text": windows(1)},
    "config, text": {"target": 4 * LENGTH, "text": windows(0, 4 * LENGTH)},
    "config": {"method": "linear"},
    "tuning": {"config": dataclasses.replace(CONFIG, lr=1e-3)},
    "mask_token": {"mask_token_id": 1},
    "teacher": {"teacher": "the model"},
}


@pytest.mark.parametrize("what", ["weights", *OTHER])
def test_a_tuning_of_something_else_is_never_gone_on_with(what, cut, llama, tmp_path):
    before = {path: path.read_bytes() for path in cut.state.iterdir()}
    if what == "weights":
        cut.folder = save("llama", tmp_path / "other", spread=0.1)
    options = OTHER.get(what, {})
    if "teacher" in options:
        options = {"teacher": Teacher(load_checkpoint(llama).model)}
    with pytest.raises(ValueError, match=rf"tune\.json was made with other {what}\. Delete it"):
        cut.run(**options)
    assert {path: path.read_bytes() for path in cut.state.iterdir()} == before


def flipped(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "a flipped bit": lambda path: flipped(path, 0.7),
    "half of it": half,
    "nothing in it": lambda path: path.write_bytes(b""),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path: path.write_text("[1]"),
    "an empty object": lambda path: path.write_text("{}"),
    "a digit changed": lambda path: path.write_text(path.read_text().replace("5", "6", 1)),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("damage", [*DAMAGE, "gone"])
@pytest.mark.parametrize("name", [TUNING_STATE_FILE, "tune-2.safetensors"])
def test_a_damaged_tuning_starts_again_and_says_so(name, damage, cut, whole, caplog):
    if damage == "a digit changed" and name != TUNING_STATE_FILE:
        pytest.skip("no text")
    path = cut.state / name
    if damage == "gone":
        path.unlink()
    else:
        DAMAGE[damage](path)
    losses, weights = cut.run()
    assert cut.steps == 5
    losses_of_whole, weights_of_whole = whole
    assert losses == losses_of_whole
    assert all(torch.equal(weights[name], weights_of_whole[name]) for name in weights_of_whole)
    said = [record.getMessage() for record in caplog.records if record.name == "posenc.hf"]
    if not (damage == "gone" and name == TUNING_STATE_FILE):  # then there is nothing to miss
        (line,) = said
        assert str(cut.state / TUNING_STATE_FILE) in line
        assert "is done again" in line


def search(folder: Path, state: Path | None, text: Windows | None = None) -> FrequencySearch:
    checkpoint = load_checkpoint(folder)
    text = windows().take(3) if text is None else text
    return FrequencySearch(
        LossReader(checkpoint.model), checkpoint.rope_settings, text, LENGTH, state
    )


@pytest.mark.parametrize("what", ["weights", "text", "settings"])
def test_a_search_for_something_else_is_never_gone_on_with(what, llama, tmp_path):
    state = tmp_path / "search.json"
    search(llama, state).evolve(0, lambda what, share: None)
    other = llama
    if what == "weights":
        other = save("llama", tmp_path / "other", spread=0.1)
    if what == "settings":  # and with it the config
        yarn = {"rope_type": "default", "rope_theta": 500.0}
        other = save("llama", tmp_path / "other", rope_parameters=yarn)
    text = windows().take(3)
    if what == "text":  # the last window is held out: it chooses among the finalists
        text = Windows(text.tokens.clone(), text.document_of_token)
        text.tokens[-1, -1] += 1
    with pytest.raises(ValueError, match=rf"search\.json was made with other .*{what}"):
        search(other, state, text)


@pytest.mark.quick(3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_search_starts_again_and_says_so(damage, llama, tmp_path, caplog):
    state = tmp_path / "search.json"
    found = search(llama, state).evolve(0, lambda what, share: None)
    DAMAGE[damage](state)
    again = search(llama, state)
    assert again.scored == {}
    assert "is done again" in caplog.text
    assert again.evolve(0, lambda what, share: None) == found


def test_two_runs_never_share_a_state(llama, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    handle = os.open(state, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    options = Options(windows=1, state=state, search_evaluations=1)
    with pytest.raises(ValueError, match="Another posenc extend works in"):
        hf.extend(llama, TARGET, DOCUMENTS, method="search", options=options)
    os.close(handle)
    hf.extend(llama, TARGET, DOCUMENTS, method="search", options=options)
    assert [path.name for path in state.iterdir()] == ["search.json"]


def test_what_a_kill_left_half_written_is_cleared(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / ".search.json.123.partial").write_text("half")
    (state / "tune").mkdir()
    (state / "tune" / ".tune-50.safetensors.123.partial").write_text("half")
    (state / ".somebody.elses.partial").write_text("kept")
    with folder_locked(state):
        assert sorted(path.name for path in state.rglob("*")) == [".somebody.elses.partial", "tune"]


def test_a_folder_that_was_made_for_nothing_is_gone(tmp_path):
    with folder_locked(tmp_path / "state"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_export_is_cleared_and_a_running_one_left_alone(llama, tmp_path):
    left = tmp_path / ".out.0123456789abcdef.unproved"
    (left / "sub").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    asked = {"method": "ntk", "out": tmp_path / "out", "options": Options(windows=1)}
    with pytest.raises(ValueError, match=r"Another posenc writes .*out"):
        hf.extend(llama, TARGET, DOCUMENTS, **asked)
    assert (left / "model.safetensors").exists()
    os.close(handle)
    hf.extend(llama, TARGET, DOCUMENTS, **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~_umask()


def test_a_full_disk_is_a_failed_run_and_not_wrong_input(llama, tmp_path, monkeypatch):
    from posenc.extend.export import folder

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "copy_tokenizer", full)
    options = Options(windows=1)
    with pytest.raises(OSError, match="No space left"):
        hf.extend(llama, TARGET, DOCUMENTS, method="ntk", out=tmp_path / "out", options=options)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_gone_is_not_blamed_on_the_model(llama, tmp_path, monkeypatch):
    def gone(*given: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "state")

    monkeypatch.setattr("posenc.extend.frequency_search.write_sealed", gone)
    options = Options(windows=1, search_evaluations=2, state=tmp_path / "state")
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'state'"):
        hf.extend(llama, TARGET, DOCUMENTS, method="search", options=options)


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_what_was_kept_is_gone_once_the_export_stands(tmp_path, call):
    """A kill between the export's name and its page."""
    out, state = tmp_path / "out", default_state_folder(tmp_path / "out")
    model = save("llama", tmp_path / "llama")
    for folder in (out, state):
        folder.mkdir()
    for there, told, left in (
        ("other.txt", "exists already; give", True),
        ("SERVE.md", "it is written and proved", False),
    ):
        (out / there).write_text("")
        code, _, err = call("extend", model, "--to", TARGET, "--out", out)
        assert code == 2 and told in err.replace("\n", " ")
        assert state.exists() is left


def test_the_state_of_another_run_stays_where_this_one_has_a_folder_of_its_own(llama, tmp_path):
    out = tmp_path / "out"
    other_state = default_state_folder(out)
    other_state.mkdir(parents=True)
    (other_state / "kept").write_text("of another run")
    options = Options(
        windows=1, search_evaluations=0, task=["none"], state=tmp_path / "mine", anyway=True
    )
    hf.extend(llama, 3 * LENGTH, DOCUMENTS, method="linear", out=out, options=options)
    assert (out / "config.json").is_file()
    assert (other_state / "kept").is_file()
