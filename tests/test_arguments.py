"""A call that does not fit a public signature is answered by what to write."""

import inspect
import re
import subprocess
import sys

import pytest
import torch

import posenc
from posenc import masks
from posenc.arguments import explain_misfits, replacement_for

SHAPE = posenc.ModelShape(64, 4)
Q = torch.zeros(1, 4, 6, 16)
ROPE = posenc.RoPE(16, interleaved=False)

PYTHONS = r"required (positional|keyword-only) argument|unexpected keyword|but \d+ (was|were) given"


def public() -> dict:
    found = {name: getattr(posenc, name) for name in posenc.__all__}
    for module, names in (
        ("masks", masks.__all__),
        ("positions", ("positions_from_mask", "positions_from_documents", "grid")),
        ("nn", posenc.nn.__all__),
        ("hf", ("attach", "detach", "attached", "shape_of", "load")),
        ("extend", ("run",)),
        ("inspect", ("measure_encodings", "measure_model", "measure_module")),
    ):
        inner = getattr(posenc, module)
        found |= {f"{module}.{name}": getattr(inner, name) for name in names}
    left_out = ("Term", "Tokens")
    return {
        name: thing
        for name, thing in found.items()
        if callable(thing)
        and not isinstance(thing, posenc.Mask)
        and name.rpartition(".")[2] not in left_out
    }


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("arguments", [{}, {"no_such_argument": 1}], ids=["none", "unknown"])
def test_no_public_call_is_answered_in_pythons_words(name, arguments):
    called = PUBLIC[name]
    if not arguments and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in inspect.signature(called).parameters.values()
    ):
        return  # nothing is missing
    with pytest.raises((TypeError, ValueError)) as raised:
        called(**arguments)
    said = str(raised.value)
    assert not re.search(PYTHONS, said), said
    assert re.match(r"[\w.]+: ", said), said
    parameters = inspect.signature(called).parameters.values()
    if arguments and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        assert "unknown argument no_such_argument" in said


@pytest.mark.parametrize("name", PUBLIC)
def test_too_many_arguments_are_counted(name):
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(PUBLIC[name]).parameters.values()):
        return
    with pytest.raises(TypeError, match=r"^[\w.]+: at most \d+ arguments without a name, got 99"):
        PUBLIC[name](*range(99))


LAYOUT = (
    "say interleaved=False (Llama, Qwen, a new model) or interleaved=True (GPT-J, GLM-4): weights "
    "fit only one"
)
CAUSAL = "unknown argument is_causal, write mask=posenc.masks.causal"
WHERE = "say q_positions=range(q_len) and kv_positions=range(kv_len)"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: posenc.RoPE(64), f"RoPE: {LAYOUT}."),
        (lambda: posenc.DecoupledRoPE(24), f"DecoupledRoPE: {LAYOUT}."),
        (
            lambda: posenc.RoPE(dim=64, base=1e4, interleaved=False),
            "RoPE: unknown argument dim, write head_dim=; unknown argument base, write rope_theta=",
        ),
        (
            lambda: posenc.RoPE(64, interleaved=False, is_neox_style=True),
            "RoPE: unknown argument is_neox_style, write interleaved=False for is_neox_style=True.",
        ),
        (
            lambda: posenc.RoPE(64, 10000.0, False),
            "RoPE: at most 2 arguments without a name, got 3, give the others by name "
            "(interleaved=, rotary_dim=, partial_rotary_factor=, scaling=).",
        ),
        (lambda: posenc.attention(Q, Q, Q), f"attention: {WHERE}."),
        (lambda: posenc.attention(Q, Q, Q, is_causal=True), f"attention: {CAUSAL}; {WHERE}."),
        (
            lambda: posenc.attention(Q, Q, Q, ROPE, positions=range(6)),
            "attention: unknown argument positions, write q_positions= and kv_positions=.",
        ),
        (
            lambda: ROPE(Q, Q),
            "RoPE: say positions=range(length), or a tensor (len) or (batch, len).",
        ),
        (lambda: posenc.ALiBi(4)(range(3)), "ALiBi: say kv_positions=range(kv_len)."),
        (
            lambda: posenc.ModelShape(d_model=64, n_heads=4),
            "ModelShape: unknown argument d_model, write embed_dim=; unknown argument n_heads, "
            "write num_heads=.",
        ),
        (
            lambda: posenc.YaRN(factor=4.0, original_max_position_embeddings=4096),
            "YaRN: unknown argument original_max_position_embeddings, write "
            "original_max_positions=.",
        ),
        (
            lambda: posenc.create("rope"),
            "create: say shape=posenc.ModelShape(embed_dim, num_heads).",
        ),
        (lambda: posenc.RoPE.from_config(), "RoPE.from_config: config is missing. "),
        (lambda: posenc.attention(Q, Q, Q, v=Q), f"attention: v is given twice; {WHERE}."),
    ],
)
def test_the_answer_says_what_to_write(call, said):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).startswith(said)


def test_an_option_of_a_named_encoding_is_answered_likewise():
    with pytest.raises(ValueError, match=r"unknown option theta; .* Did you mean 'rope_theta'\?$"):
        posenc.create("rope", SHAPE, theta=5)
    with pytest.raises(ValueError, match=r"unknown option factr; .* Did you mean 'factor'\?$"):
        posenc.create("yarn:factr=5", SHAPE)


def test_compare_answers_for_its_options():
    with pytest.raises((TypeError, ValueError), match="no_such_argument"):
        posenc.compare.run(["rope"], no_such_argument=1)


def test_a_type_error_inside_of_the_function_passes_through():
    @explain_misfits
    def inner(x):
        return x + "1"

    with pytest.raises(TypeError, match="unsupported operand"):
        inner(1)
    assert inner("0") == "01"


def test_every_replacement_is_an_argument_somewhere():
    accepted = {
        parameter
        for thing in PUBLIC.values()
        for called in (thing, getattr(thing, "forward", thing))
        for parameter in inspect.signature(called).parameters
    }
    from posenc.arguments import _REPLACEMENTS

    for other, replacements in _REPLACEMENTS.items():
        for text in replacements:
            assert text.partition("=")[0] in accepted, (other, text)


def test_what_is_not_near_is_not_suggested():
    assert replacement_for("max_position_embeddings", ["head_dim", "rope_theta"]) == ""


WITHOUT_A_STATE = """
import posenc, torch
q = torch.randn(1, 4, 3, 16)
for name in ("repo", "fox", "inkling"):
    encoding = posenc.create(name, posenc.ModelShape(64, 4))
    for states in ({}, {"q_state": q[..., :7], "kv_state": q[..., :7]}):
        try:
            posenc.attention(
                q, q, q, encoding, q_positions=range(3), kv_positions=range(3),
                mask=posenc.masks.causal, **states,
            )
        except ValueError as error:
            print(error)
"""


@pytest.mark.parametrize(
    "optimized",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["python", "python -O"],
)
def test_attention_without_a_state_says_where_to_take_it(optimized, capsys):
    if optimized:
        command = [sys.executable, "-O", "-c", WITHOUT_A_STATE]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
    else:
        exec(WITHOUT_A_STATE, {})
        lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all("state" in line for line in lines), lines
