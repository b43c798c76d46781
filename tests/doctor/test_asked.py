"""What the doctor prints where a runtime answers itself, beside what posenc knows of it."""

import json
import sys
from importlib.metadata import version

import pytest

import posenc.doctor
from posenc.doctor import choose_interpreters
from posenc.runtimes.ask import AskError, Rotation, RuntimeAnswer
from posenc.runtimes.known import emulate
from tests.doctor.judging import row_of
from tests.doctor.test_gguf import write
from tests.doctor.threads import BASE

SIMPLE = {**BASE, "rope_theta": 10000.0}
KNOWN = emulate(SIMPLE)["transformers-5"]
PAIRS = KNOWN.rotations["all"].inv_freq


def answer(at=KNOWN.version, inv_freq=PAIRS, multiplier=1.0, **changes):
    rotation = Rotation("model.rotary_emb", "", inv_freq, multiplier, called=True)
    scale = (KNOWN.softmax_scale,)
    return RuntimeAnswer(
        "transformers",
        at,
        model="LlamaForCausalLM",
        rotations=(rotation,),
        softmax_scales=scale,
        **changes,
    )


@pytest.fixture
def doctor(call, tmp_path, monkeypatch):
    """doctor(config, {interpreter: answer or error}, options...) -> (exit code, stdout, stderr)"""

    def run(config, answers, *options):
        asked = []

        def ask(questions, python, runtime):
            asked.append(len(questions))
            given = answers[python]
            if isinstance(given, AskError):
                raise given
            return [given] * len(questions)

        monkeypatch.setattr(choose_interpreters, "ask", ask)
        monkeypatch.setattr(
            choose_interpreters,
            "installed_runtime_version",
            lambda runtime: "5" if runtime == "transformers" and None in answers else None,
        )

        def runtimes_of(python):
            if isinstance(answers[python], AskError):
                raise answers[python]
            return {answers[python].runtime: answers[python].version}

        monkeypatch.setattr(choose_interpreters, "runtimes_of", runtimes_of)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        run.asked = asked
        return call("doctor", path, *options)

    return run


def cells(out: str, name: str) -> str:
    """A runtime's row, without the frame of the table."""
    return "  ".join(row_of(name, out))


def test_the_table_says_who_was_asked_and_who_is_known(doctor):
    code, out, err = doctor(SIMPLE, {None: answer("5.99.1")})
    assert (code, err) == (0, "")
    assert "asked, 5.99.1  as meant" in cells(out, "transformers-5")
    assert "known, 0.33.0  as meant" in cells(out, "vllm")


@pytest.mark.parametrize(
    ("version", "noticed"),
    [("5.99.1", True), ("5.25.0.dev0", True), ("5.24.0", False), (KNOWN.version, False)],
)
def test_a_release_that_nothing_is_recorded_of_is_noticed(doctor, version, noticed):
    code, out, _ = doctor(SIMPLE, {None: answer(version)})
    said = f"Installed is transformers {version}, and posenc has recorded 5.0 to 5.24"
    assert code == 0 and (said in " ".join(out.split())) is noticed


def test_without_a_runtime_beside_posenc_nobody_is_asked(doctor):
    code, out, _ = doctor(SIMPLE, {})
    assert code == 0 and "asked" not in out


def test_none_asks_nobody(doctor):
    code, out, _ = doctor(SIMPLE, {None: answer()}, "--ask", "none")
    assert code == 0 and "asked" not in out


def test_what_a_runtime_answers_is_judged(doctor):
    """A later release computes other frequencies: the answer counts, not what is recorded."""
    slower = tuple(f / 2 for f in PAIRS)
    _, out, _ = doctor(SIMPLE, {None: answer("5.99.0", slower)})
    assert "other" in cells(out, "transformers-5")
    assert "recorded for this version" not in out


@pytest.mark.parametrize(
    ("given", "aspect"),
    [
        (answer(inv_freq=tuple(f / 2 for f in PAIRS)), "frequencies"),
        (answer(inv_freq=PAIRS[:-1]), "pairs"),
        (answer(multiplier=1.2), "multiplier"),
        (RuntimeAnswer("transformers", KNOWN.version, refusal="ValueError: no"), "error"),
    ],
)
def test_a_record_that_the_runtime_contradicts_is_said(doctor, given, aspect):
    _, out, _ = doctor(SIMPLE, {None: given})
    said = f"itself answers otherwise than posenc recorded for this version ({aspect})"
    assert f"transformers-5 {KNOWN.version} {said}" in out


def test_a_record_that_the_runtime_confirms_is_not_mentioned(doctor):
    _, out, _ = doctor(SIMPLE, {None: answer()})
    assert "otherwise" not in out


def test_another_switch_than_the_recorded_one_is_a_contradiction(doctor):
    _, out, _ = doctor(SIMPLE, {None: answer(changes=True)})
    assert "posenc recorded for this version (switch)" in out


@pytest.mark.parametrize("given", [{"why_unmeasured": "tables"}, {"rotations": ()}])
def test_what_was_not_measured_is_known_or_contradicted(doctor, given):
    asked = RuntimeAnswer("transformers", KNOWN.version, **given)
    _, out, _ = doctor(SIMPLE, {None: asked})
    assert ("known, 5" in cells(out, "transformers-5")) == ("why_unmeasured" in given)


def test_a_family_that_posenc_does_not_know_is_asked(doctor):
    config = {"model_type": "nobody_has_heard_of_it", "max_position_embeddings": 64}
    code, out, err = doctor(config, {None: answer("5.99.0", (1.0, 0.25), 1.5)})
    assert (code, err) == (3, "")
    assert "posenc does not know the family 'nobody_has_heard_of_it'" in out
    assert "transformers-5 5.99.0, asked: LlamaForCausalLM" in out
    assert "rotates 4 channels of each head, slowest pair 0.25 radians per position" in out
    assert "0.25 radians per position, multiplier 1.5" in out


def test_a_family_that_nobody_knows(doctor):
    code, out, err = doctor({"model_type": "nobody_has_heard_of_it"}, {})
    assert code == 3 and "does not know the family" in out + err
    assert "cannot judge it. --ask PYTHON asks a runtime that has it." in out + err


def test_json_says_it_too(doctor):
    _, out, _ = doctor(SIMPLE, {None: answer("5.99.0")}, "--json")
    runtimes = json.loads(out)["runtimes"]
    assert runtimes["transformers-5"]["asked"] is True
    assert runtimes["transformers-5"]["version"] == "5.99.0"
    assert runtimes["vllm"]["asked"] is False


def test_an_interpreter_without_an_answer_leaves_what_is_known(doctor):
    error = AskError("--ask /python: no answer within 60 seconds.")
    code, out, _ = doctor(SIMPLE, {"/python": error}, "--ask", "/python")
    assert code == 0
    assert "--ask /python: no answer within 60 seconds. What posenc knows is shown." in out
    assert "known, 5" in cells(out, "transformers-5")


def test_two_interpreters_of_two_releases(doctor):
    answers = {"/four": answer("4.57.6"), "/five": answer("5.1.0")}
    _, out, _ = doctor(SIMPLE, answers, "--ask", "/four", "--ask", "/five")
    assert "asked, 4.57.6" in cells(out, "transformers-4")
    assert "asked, 5.1.0" in cells(out, "transformers-5")


def mlx():
    rotation = Rotation("layers.0.self_attn.rope", "", PAIRS, 1.0, called=True, layers=(0, 1))
    return RuntimeAnswer(
        "mlx-lm", "0.99.0", rotations=(rotation,), softmax_scales=(KNOWN.softmax_scale,)
    )


def test_another_runtime_is_asked_and_its_row_says_so(doctor):
    _, out, _ = doctor(SIMPLE, {"/mlx": mlx(), "/five": answer("5.1.0")}, "--ask", "/mlx")
    assert "asked, 0.99.0" in cells(out, "mlx-lm")
    assert "known, 5" in cells(out, "transformers-5")


def test_one_runtime_of_an_interpreter_can_be_named(doctor):
    _, out, _ = doctor(SIMPLE, {"/a=b": mlx()}, "--ask", "mlx-lm=/a=b")
    assert "asked, 0.99.0" in cells(out, "mlx-lm")


def test_a_runtime_that_for_leaves_out_is_not_asked(doctor):
    """Its answer would be an error, and nothing is said of it."""
    answers = {"/mlx": mlx(), "/five": answer("5.1.0")}
    options = ("--ask", "/mlx", "--ask", "/five", "--for", "transformers-5")
    _, out, _ = doctor(SIMPLE, answers, *options)
    assert "asked, 5.1.0" in cells(out, "transformers-5")
    assert doctor.asked == [1]


def test_a_runtime_without_such_a_model_has_none(doctor):
    refuses = {"refusal": "ValueError: Model type llama not supported.", "no_model": True}
    _, out, _ = doctor(
        SIMPLE, {"/mlx": RuntimeAnswer("mlx-lm", "0.99.0", **refuses)}, "--ask", "/mlx"
    )
    assert "no such model" in cells(out, "mlx-lm")


def test_two_interpreters_of_one_release_line(doctor):
    answers = {"/one": answer("5.2.0"), "/two": answer("5.1.0")}
    code, _, err = doctor(SIMPLE, answers, "--ask", "/one", "--ask", "/two")
    assert code == 2 and "two interpreters have transformers-5: 5.2.0 and 5.1.0" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ask", "none", "--ask", "/python"), "--ask none asks nobody"),
        (("--ask", ""), "--ask is empty"),
        (
            ("--ask", "/python", "--for", "llama.cpp"),
            "nobody is asked about llama.cpp",
        ),
        (("--ask", "/python", "--overrides", "vllm"), "--ask goes with judging a file"),
    ],
)
def test_a_question_that_cannot_be_asked(doctor, options, words):
    code, out, err = doctor(SIMPLE, {"/python": answer()}, *options)
    assert (code, out) == (2, "") and words in err


def test_another_version_than_the_installed_one_is_not_answered_by_it(doctor):
    _, out, _ = doctor(SIMPLE, {None: answer("5.99.0")}, "--for", "transformers==5.12")
    assert "known, 5.12" in cells(out, "transformers-5")
    _, out, _ = doctor(SIMPLE, {None: answer("5.12.1")}, "--for", "transformers==5.12")
    assert "asked, 5.12.1" in cells(out, "transformers-5")


def test_each_asks_once_for_all_files(doctor, tmp_path):
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "config.json")
        paths[-1].write_text(json.dumps(SIMPLE), encoding="utf-8")
    code, out, _ = doctor(SIMPLE, {None: answer("5.99.0")}, *paths, "--each")
    assert code == 0 and out.count("asked, 5.99.0") == 3
    assert doctor.asked == [3]


def test_a_config_is_asked_about_whatever_its_file_is_called(doctor, call, tmp_path):
    doctor(SIMPLE, {None: answer("5.99.0"), "python": AskError("no python.")})
    path = tmp_path / "of the model.json"
    path.write_text(json.dumps(SIMPLE), encoding="utf-8")
    _, out, _ = call("doctor", path)
    assert "asked, 5.99.0" in cells(out, "transformers-5")
    _, out, err = call("doctor", path, "--ask", "python")
    assert "no python. What posenc knows is shown." in out + err
    assert "asked" not in cells(out, "transformers-5")


def test_an_interpreter_that_is_named_for_a_file_of_another_kind_is_not_passed_by(
    doctor, call, tmp_path
):
    doctor(SIMPLE, {None: answer("5.99.0"), "python": answer("5.99.0")})
    path = tmp_path / "params.json"
    meta = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100, "rope_theta": 10000.0}
    path.write_text(json.dumps(meta), encoding="utf-8")
    said = "--ask: the runtimes that are asked read no file of this kind (meta)"
    for options, expected in (((), False), (("--ask", "none"), False), (("--ask", "python"), True)):
        _, out, err = call("doctor", path, *options)
        assert (said in out + err) == expected


def test_each_runtime_is_asked_about_the_files_that_it_reads(doctor, call, tmp_path):
    """llama.cpp reads GGUF files, and transformers none of them."""
    loads = RuntimeAnswer(
        "llama.cpp", "b11549", loaded={"freq_base_train": 5e5, "rope scaling": "linear"}
    )
    path = write(tmp_path / "a.gguf", freq_base=5e5)
    doctor(SIMPLE, {"llama": loads, "python": answer("5.99.0"), "missing": AskError("no python.")})
    _, out, _ = call("doctor", path, "--ask", "llama", "--ask", "python")
    assert "asked, b11549" in cells(out, "llama.cpp") and "what it computes" in out
    assert "read no file of this kind" not in out and "itself answers otherwise" not in out
    _, out, _ = call("doctor", path, "--ask", "python")
    assert "known, b11549" in cells(out, "llama.cpp") and "no file of this kind (gguf)" in out
    _, out, _ = call("doctor", path, "--ask", "missing", "--ask", "llama")
    assert "asked, b11549" in cells(out, "llama.cpp")


def test_a_loader_that_takes_another_base_contradicts_the_record(doctor, call, tmp_path):
    loads = RuntimeAnswer("llama.cpp", "b11549", loaded={"freq_base_train": 1e4})
    path = write(tmp_path / "a.gguf", freq_base=5e5)
    doctor(SIMPLE, {"llama": loads})
    _, out, _ = call("doctor", path, "--ask", "llama")
    assert "llama.cpp b11549 itself answers otherwise" in out and "(frequencies)" in out


def test_a_file_that_the_loader_refuses_is_an_error_in_its_words(doctor, call, tmp_path):
    path = write(tmp_path / "a.gguf", freq_base=5e5)
    doctor(SIMPLE, {"llama": RuntimeAnswer("llama.cpp", "b11549", refusal="invalid n_rot: 32")})
    code, out, _ = call("doctor", path, "--ask", "llama")
    assert code == 1 and "invalid n_rot: 32" in out


def test_an_interpreter_that_gave_no_answer_about_an_unknown_family_is_said(doctor):
    unknown = {**SIMPLE, "model_type": "nobody_knows"}
    code, out, _ = doctor(unknown, {"python": AskError("no python.")}, "--ask", "python")
    assert code == 3
    assert "no python. Nothing was judged" in out


@pytest.mark.asks
def test_the_installed_release_is_asked(call, tmp_path):
    assert_the_installed_release_answers(call, tmp_path)


@pytest.mark.slow
@pytest.mark.asks
def test_an_interpreter_of_its_own_is_asked(call, tmp_path, fresh_process):
    assert_the_installed_release_answers(call, tmp_path, "--ask", sys.executable)


def assert_the_installed_release_answers(call, tmp_path, *options):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIMPLE), encoding="utf-8")
    code, out, _ = call("doctor", path, *options)
    assert code == 0
    assert row_of("transformers-5", out)[1:3] == [f"asked, {version('transformers')}", "as meant"]


@pytest.mark.asks
def test_the_installed_release_is_asked_from_python():
    pytest.importorskip("transformers")
    asked = posenc.doctor.ask(SIMPLE)
    assert asked.rotations[0].inv_freq == pytest.approx(PAIRS, rel=1e-6)


def test_a_model_that_is_built_and_stops_in_its_forward_pass_is_refused(call, tmp_path):
    """Nothing is as meant where the first token is never computed."""
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {**SIMPLE, "partial_rotary_factor": 0.5, "rope_scaling": stretched}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    for asked in (("--ask", "none"), ()):
        code, out, _ = call("doctor", path, *asked)
        assert code == 1
        for runtime in ("transformers-4", "transformers-5"):
            assert "refuses" in cells(out, runtime)
