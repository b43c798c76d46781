"""The check against real runtimes: its verdict, and an environment that cannot be installed."""

import json
import subprocess
import sys

import numpy
import pytest

from tests.doctor.oracles import __main__ as oracles


@pytest.mark.parametrize(
    ("said", "name", "off", "wrong"),
    [
        ("transformers 4.57.3", "fixed", 3e-5, False),
        ("transformers 4.57.3", "fixed", 2e-3, True),
        ("transformers 4.57.3", "fixed", float("nan"), True),
        ("libllama in xllamacpp 1", "fixed.gguf", 2e-3, True),
        ("transformers 4.57.3", "broken", 13.0, False),
        ("transformers 4.57.3", "broken", 1e-5, True),
        ("mlx-lm 0.32.2", "broken", float("nan"), True),
        ("transformers 5.23.0", "broken", 0.0, False),
        ("libllama in xllamacpp 1", "plain.gguf", 1e-5, True),
    ],
)
def test_the_verdict(said, name, off, wrong):
    from tests.doctor.oracles.run import verdict

    assert bool(verdict(said, name, off)) is wrong


@pytest.mark.slow
def test_a_runtime_that_cannot_be_installed_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(oracles, "HOME", tmp_path)
    monkeypatch.setattr(oracles, "RUNTIMES", {"mlx": (str(tmp_path / "nowhere"),)})
    assert oracles.python_of("mlx") is None
    out = capsys.readouterr().out
    assert "mlx is left out, it cannot be installed: ERROR" in out
    assert not (tmp_path / "mlx/.installed").exists()
    assert oracles.main() == 0
    assert "skipped, no runtime could be installed" in capsys.readouterr().out


def test_the_environments_hold_the_versions_that_the_emulators_were_read_from():
    from posenc.runtimes.known import RELEASES_IN_WORDS

    for name, runtime in (("transformers4", "transformers-4"), ("mlx", "mlx-lm")):
        _, version = oracles.RUNTIMES[name][0].split("==")
        assert version in RELEASES_IN_WORDS[runtime]


@pytest.mark.slow
def test_an_installation_that_does_not_end_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(oracles, "HOME", tmp_path)
    monkeypatch.setattr(oracles, "RUNTIMES", {"mlx": ("mlx-lm==0.32.2",)})
    monkeypatch.setattr(oracles, "LONGEST_INSTALL", 0.05)
    assert oracles.python_of("mlx") is None
    assert "mlx is left out" in capsys.readouterr().out


def test_a_runtime_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    from tests.doctor.oracles import run

    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "LONGEST_RUN", 0.5)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        run.logits(sys.executable, "sleeps.py", tmp_path, tmp_path / "tokens.json")


@pytest.mark.parametrize("off", [0.0, 1e-5, 2.0, float("nan")])
def test_an_export_is_read_alike_and_a_broken_one_is_not(off):
    from tests.doctor.oracles.exports import verdict

    assert bool(verdict("transformers 4.57.3", off, 1e-3, whole=True)) is not (off <= 1e-3)
    assert bool(verdict("transformers 4.57.3", off, 1e-3, whole=False)) is not (off > 1e-3)


def test_a_version_that_reads_an_export_otherwise_or_a_broken_one_alike_is_named(
    tmp_path, monkeypatch
):
    from tests.doctor.oracles import exports

    def extended(model, method, out):
        out.mkdir()
        keys = {"rope_parameters": 1, "rope_scaling": 2, "rope_theta": 3}
        (out / "config.json").write_text(json.dumps(keys))
        return numpy.zeros(2)

    def read(python, folders):
        off = {
            "right": lambda keys: "rope_scaling" not in keys,
            "blind": lambda keys: 0,
            "wrong": lambda keys: 1,
        }[python]
        keys = [json.loads((folder / "config.json").read_text()) for folder in folders]
        return python, [numpy.full(2, float(off(each))) for each in keys]

    monkeypatch.setattr(exports, "extended", extended)
    monkeypatch.setattr(exports, "METHODS", ("ntk",))
    told = {
        "right": [],
        "blind": [
            "blind, ntk without rope_theta and rope_scaling: off by only 0.0e+00, so the "
            "check sees nothing"
        ],
        "wrong": ["wrong, ntk: off by 1.0e+00"],
    }
    for python, wrong in told.items():
        (root := tmp_path / python).mkdir()
        assert exports.check_exports(root, root, {"transformers4": python}, read, 1e-3) == wrong


@pytest.mark.parametrize(
    ("name", "seen", "wrong"),
    [
        ("llama", [(False, 9.0), (True, 1e-5)], False),
        ("llama", [(False, 9.0), (True, 0.25)], True),
        ("llama", [(False, 9.0), (True, float("nan"))], True),
        ("llama", [(False, 1e-5), (True, 1e-5)], True),
        ("llama", [(True, float("inf")), (True, 1e-5)], True),
        ("llama", [(False, 9.0), (False, 9.0)], True),
        ("gemma", [(False, 9.0), (False, 9.0)], False),
        ("gemma", [(False, 9.0), (False, 1e-5)], True),
        ("gemma", [(False, 9.0), (True, 1e-5)], True),
    ],
)
def test_what_fix_proves_is_held_to_the_logits(name, seen, wrong):
    from tests.doctor.oracles.families import verdict

    assert bool(verdict(name, {"mlx-lm": seen})) is wrong


WAVES = {"all": ([1.0, 0.01], 1.0)}
OTHER = {"all": ([1.0, 0.02], 1.0)}
NAN = {"all": ([1.0, float("nan")], 1.0)}


@pytest.mark.parametrize(
    ("before", "after", "proved", "said"),
    [
        (WAVES, WAVES, True, ""),
        (OTHER, WAVES, True, ""),
        (WAVES, OTHER, False, "no more from the copy"),
        (WAVES, NAN, False, "no more from the copy"),
        (OTHER, OTHER, True, "is called proved"),
        (OTHER, "KeyError: 'factor'", True, "is called proved"),
        (OTHER, {}, True, "is called proved"),
        ("KeyError: 'factor'", OTHER, False, ""),
        ("no model", "no model", False, ""),
    ],
)
def test_a_fix_that_harms_or_proves_falsely_is_seen(before, after, proved, said):
    from tests.doctor.oracles.harmless import Fixed, verdict

    row = Fixed("a", {}, ("PD004",), {}, "", frozenset({"mlx"} if proved else ()), WAVES)
    row.real = {"mlx": [before, after]}
    found = "".join(verdict(row))
    assert said in found and bool(said) is bool(found)


def test_a_refusal_without_its_key_is_seen():
    from tests.doctor.oracles.harmless import Fixed, verdict

    assert not verdict(Fixed("a", {}, ("PD004", "rope_theta"), None, "PD004: no rope_theta"))
    assert verdict(Fixed("a", {}, ("PD004", "rope_theta"), None, "PD013: the factor"))


@pytest.mark.slow
def test_strangers_are_mended_without_harm(tmp_path):
    """A tenth of the configs of the nightly check, in the transformers of the tests."""
    pytest.importorskip("transformers", minversion="5.0")
    from tests.doctor.oracles import harmless

    given = harmless.strangers()
    assert len(given) >= 200
    written = 0
    for i, row in enumerate(given[::10]):
        (root := tmp_path / str(i)).mkdir()
        fixed = harmless.mend(*row, root)
        if fixed.written:
            written += 1
            numbers = [harmless.computed(file) for file in (fixed.config, fixed.written)]
            fixed.real = {"transformers-5": numbers}
        assert not harmless.verdict(fixed), fixed.name
    assert written >= 10
