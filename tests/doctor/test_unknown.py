"""What posenc has not read it does not judge, fix or prove."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import RUNTIME_FILES, all_families
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import require_understood_keys
from posenc.runtimes.known import RUNTIMES, emulate
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of
from tests.doctor.judging import row_of, run
from tests.doctor.threads import BASE

SIMPLE = {**BASE, "rope_theta": 10000.0}
BROKEN = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
NO_TYPE = {k: v for k, v in SIMPLE.items() if k not in ("model_type", "architectures")}


@pytest.fixture
def file(tmp_path):
    def write(value, name="config.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
        return path

    return write


@pytest.mark.parametrize("raw", [{**SIMPLE, "model_type": "lama"}, NO_TYPE], ids=["typo", "none"])
def test_an_unknown_family_is_not_judged(file, raw):
    said, code = run(Options((file(raw),)))
    assert code == 3
    assert "Nothing was judged, fixed or proved." in said and "as meant" not in said
    assert {c.known for c in emulate(raw).values()} == {"unknown"}
    with pytest.raises(UnknownFamilyError):
        meaning_of(raw)


def test_a_null_head_dim_is_not_judged_where_the_class_has_a_number(file):
    raw = {**SIMPLE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": None}
    said, code = run(Options((file(raw),)))
    assert code == 3 and "head_dim null means for qwen3" in said and "remove the key" in said


def test_a_typo_is_asked_about(file):
    assert "did you mean 'llama'?" in run(Options((file({**SIMPLE, "model_type": "lama"}),)))[0]
    # A name that is known, of a family that posenc has not read, is not proposed for itself.
    assert "did you mean" not in run(Options((file({**SIMPLE, "model_type": "Glm4vMoe_text"}),)))[0]


def test_only_a_near_spelling_is_asked_about(file):
    said, code = run(Options((file({**SIMPLE, "model_type": "xlm_roberta"}),)))
    assert code == 3 and "did you mean 'xlm-roberta'?" in said
    for name in ("some_bert", "my_euro", "lamma_x"):  # nearest are eurobert and llama
        said, code = run(Options((file({**SIMPLE, "model_type": name}),)))
        assert code == 3 and "did you mean" not in said and f"the family {name!r} and" in said


def test_a_model_without_rotation_is_said_to_have_none(file):
    for name in ("xlm-roberta", "roberta", "bert"):
        with pytest.raises(UnknownFamilyError, match=f"^{name} has no rotary positions"):
            meaning_of({**SIMPLE, "model_type": name})
    jina = {**SIMPLE, "model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    said, code = run(Options((file(jina),)))
    assert code == 3 and "does not know the family 'xlm-roberta' and cannot judge" in said


def test_a_family_of_several_parts_is_not_asked_about_as_itself(file):
    said, code = run(Options((file({**SIMPLE, "model_type": "glm4v"}),)))
    assert code == 3 and "did you mean" not in said
    assert "does not know the family 'glm4v' without a text_config" in said


def test_the_last_line_promises_no_copy_where_fix_refuses(file):
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    path = file({**SIMPLE, "rope_scaling": rope})
    with pytest.raises(ValueError, match="--fix writes nothing"):
        run(Options((path,), fix=True, out=path.parent / "new"))
    assert "writes a mended copy" not in run(Options((path,)))[0]


@pytest.mark.parametrize("what", ["fix", "overrides", "convert", "compare", "json"])
def test_nothing_is_written_for_an_unknown_family(file, tmp_path, what):
    path, out = file({**BROKEN, "model_type": "lama"}), tmp_path / "new"
    options = {
        "fix": Options((path,), fix=True, out=out),
        "overrides": Options((path,), overrides="vllm"),
        "convert": Options((path.parent,), convert_layout="interleaved", out=out),
        "compare": Options((path, path)),
        "json": Options((path,), as_json=True),
    }[what]
    said, code = run(options)
    assert code == 3 and not out.exists() and "lama" in said
    if what == "json":
        assert json.loads(said)["judged"] is False


def test_of_two_paths_the_one_that_is_not_known_is_named(file, tmp_path):
    sound = file(SIMPLE, "sound/config.json").parent
    typo = file({**SIMPLE, "model_type": "lama"}, "typo/config.json").parent
    for paths in ((sound, typo), (typo, sound)):
        said, code = run(Options(paths))
        assert code == 3 and said.startswith(f"{typo}: ") and str(sound) not in said
    broken = file({**SIMPLE, "head_dim": "x"}, "broken/config.json").parent
    with pytest.raises(ValueError, match=f"^{broken}: config.json: head_dim must be an integer"):
        run(Options((sound, broken)))


def test_what_like_names_is_named_if_it_is_not_known(file, tmp_path):
    from tests.doctor.test_gguf import write

    like = file({**SIMPLE, "model_type": "lama"}, "like/config.json")
    plain = write(tmp_path / "plain.gguf")
    said, code = run(Options((plain,), fix=True, like=like, out=tmp_path / "new.gguf"))
    assert code == 3 and f"{like}: posenc does not know" in said


def test_a_runtime_without_the_model_alone_judges_nothing(file):
    gptneox = {**SIMPLE, "model_type": "gpt_neox_japanese"}
    assert run(Options((file(gptneox),), for_="mlx-lm"))[1] == 3
    assert run(Options((file(gptneox),)))[1] in (0, 1)


def test_an_unread_column_is_named_and_changes_no_exit_code(file):
    raw = {**SIMPLE, "model_type": "helium", "architectures": ["HeliumForCausalLM"]}
    assert "vllm" not in all_families()["helium"]
    said, code = run(Options((file(raw),)))
    assert row_of("vllm", said)[2] == "not known to posenc"
    assert code == 0 and "Not known to posenc, and not judged: vllm, sglang" in said


def test_each_passes_with_a_notice_and_fails_if_strict(file):
    paths = (file({**SIMPLE, "model_type": "lama"}, "a/config.json"), file(SIMPLE, "b/config.json"))
    said, code = run(Options(paths, each=True))
    assert code == 0 and "notice: 1 of 2 files were not judged" in said
    assert run(Options(paths, each=True, strict=True))[1] == 3
    bad = file(BROKEN, "c/config.json")
    assert run(Options((*paths, bad), each=True, strict=True))[1] == 1
    with pytest.raises(ValueError, match="--strict goes with --each"):
        run(Options(paths[:1], strict=True))


@pytest.mark.parametrize("name", sorted(all_families()))
def test_every_cell_says_where_it_was_read(name):
    facts = all_families()[name]
    for cell in RUNTIME_FILES.values():
        if facts.get(cell):
            assert facts[cell]["read"].partition(":")[0].endswith(".py"), cell


def test_a_cell_is_needed_for_every_runtime():
    """No runtime computes anything from a row whose cell was taken out."""
    facts = all_families()["llama"]
    for runtime, cell in RUNTIME_FILES.items():
        kept = facts.pop(cell)
        try:
            assert emulate(SIMPLE, None, [runtime])[runtime].known == "unknown"
            facts[cell] = None
            assert emulate(SIMPLE, None, [runtime])[runtime].known == "no model"
        finally:
            facts[cell] = kept
        assert emulate(SIMPLE, None, [runtime])[runtime].known == "yes"
    assert set(RUNTIME_FILES) == set(RUNTIMES)


def test_five_refusals_are_an_error(file):
    yarn = {**SIMPLE, "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 99}}
    said, code = run(Options((file(yarn),)))
    assert code == 1 and said.count("refuses") == 5 and "E PD052" in said


def test_fix_names_a_key_that_it_does_not_understand(file, tmp_path):
    for changes, words in (
        ({"rope_magic": 3}, "rope_magic means for llama"),
        (
            {
                "rope_parameters": None,
                "rope_theta": 500000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0, "warp": 1},
            },
            "rope_scaling.warp",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            run(Options((file({**BROKEN, **changes}),), fix=True, out=tmp_path / "new"))
        assert not (tmp_path / "new").exists()


def test_fix_proves_only_what_has_the_model_and_says_what_it_looked_at(file, tmp_path):
    raw = {
        **BASE,
        "model_type": "arcee",
        "architectures": ["ArceeForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    said, _ = run(Options((file(raw, "some.json"),), fix=True, out=tmp_path / "new"))
    (proved,) = [line for line in said.splitlines() if line.startswith("proved")]
    assert "from config.json:" in proved and "mlx-lm" not in proved and "vllm" in proved
    assert "not proved: mlx-lm: no such model" in said


def folder_of(tmp_path, shape):
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BROKEN))
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": np.ones(shape, "f4") for i in range(6)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_weights_that_do_not_fit_are_not_proved(tmp_path):
    folder, out = folder_of(tmp_path, (60, 64)), tmp_path / "new"
    with pytest.raises(ValueError, match=r"q_proj.weight has 60 rows, expected 64"):
        run(Options((folder,), fix=True, out=out))
    assert not out.exists()


@pytest.mark.parametrize("size", [0, 100, -40])
def test_cut_weights_are_not_proved(tmp_path, size):
    folder, out = folder_of(tmp_path, (64, 64)), tmp_path / "new"
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="damaged safetensors"):
        run(Options((folder,), fix=True, out=out))
    assert not out.exists()


def test_code_pickles_and_auto_map_stay_behind(tmp_path):
    folder, out = folder_of(tmp_path, (64, 64)), tmp_path / "new"
    (folder / "config.json").write_text(json.dumps({**BROKEN, "auto_map": {"AutoConfig": "x.X"}}))
    for name in ("x.py", "pytorch_model.bin", "run.sh", "tokenizer.json", "notes.txt"):
        (folder / name).write_text("{}")
    said, _ = run(Options((folder,), fix=True, out=out))
    kept = {path.name for path in out.iterdir()}
    assert kept == {"config.json", "model.safetensors", "tokenizer.json"}
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert "left behind: notes.txt, pytorch_model.bin, run.sh, x.py" in said
    assert "the headers of 1 weight file and the shapes of 6 tensors" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_frobnicate", 0),
        ("rope_frobnicate", 0.0),
        ("rope_frobnicate", []),
        ("use_nope", True),
        ("use_logn_attn", True),
        ("use_rope", False),
        ("rotary", False),
        ("use_rotary_embeddings", False),
        ("apply_rotary_pos_emb", False),
    ],
)
def test_a_key_about_positions_is_reported_whatever_its_value(file, key, value):
    path = file({**SIMPLE, key: value})
    said, _ = run(Options((path,)))
    assert "PD055" in said and f"{key} {in_json_words(value)}" in said
    assert "Nothing to complain" not in said
    with pytest.raises(ValueError, match=f"does not know what {key} means"):
        require_understood_keys({**SIMPLE, key: value}, model_of(SIMPLE))


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_nope", False), ("use_logn_attn", False), ("use_yarn", False), ("rope_frobnicate", None)],
)
def test_a_key_that_turns_an_extension_off_is_not_reported(file, key, value):
    assert "PD055" not in run(Options((file({**SIMPLE, key: value}),)))[0]
