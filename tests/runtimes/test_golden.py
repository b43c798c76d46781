"""Every emulator against what the runtime's own code gave."""

import dataclasses

import pytest

from posenc.frequencies.float64_formulas import yarn_frequencies
from posenc.runtimes.known import RUNTIMES
from tests.runtimes.golden_cases import TRIED, cells, config

CELLS = cells()


def assert_reproduced(cell, emulate):
    """The emulator's answer is the recorded one."""
    got = emulate(cell.config, None)
    if cell.error is not None:
        assert got.error, f"expected a refusal: {cell.error}"
        assert not got.rotations
        return
    assert got.error is None
    assert_switch(cell, emulate, got.switch)
    for scale in cell.scales:
        assert got.softmax_scale == pytest.approx(scale, rel=1e-6)
    for row in cell.rows:
        assert_row(row, cell, emulate(cell.config, row.length))


def assert_switch(cell, emulate, switch):
    """The switch is the recorded one. The longest sequence tried was the config's longest: what was
    static among those may change beyond."""
    if switch == "length" and cell.switch == "static":
        longest = cell.config["max_position_embeddings"]
        short, long, beyond = (emulate(cell.config, n).rotations for n in (1, longest, 2 * longest))
        assert short == long != beyond
    elif switch == "static" and cell.switch == "start":
        numbers = {repr((row.inv_freq, row.multiplier)) for row in cell.rows}
        assert len(numbers) == 1, "two lists of the same numbers, of which the start chooses one"
    else:
        assert switch == (cell.switch or switch)


def assert_row(row, cell, got):
    if isinstance(row.layers, int) and not row.inv_freq:
        assert row.layers in got.without_rotation
        return
    kinds = row.kinds(list(got.rotations), cell.config.get("layer_types", []))
    assert kinds, f"no layers like {row.layers} in {list(got.rotations)}"
    for kind in kinds:
        layer = got.rotations[kind]
        assert layer.inv_freq == pytest.approx(row.inv_freq, rel=1e-6, abs=1e-25), row
        assert layer.multiplier == pytest.approx(row.multiplier, rel=1e-6), row


@pytest.mark.quick(1000)  # all: 4 ms each
@pytest.mark.parametrize("cell", CELLS, ids=[f"{c.case}-{c.runtime}" for c in CELLS])
def test_an_emulator_gives_what_the_runtime_gave(cell):
    assert_reproduced(cell, RUNTIMES[cell.runtime])


@pytest.mark.parametrize(
    "cell",
    [c for c in CELLS if c.runtime == "vllm" and "default_max_model_len" in c.recorded],
    ids=lambda c: c.case,
)
def test_vllm_admits_the_lengths_that_it_admitted(cell):
    largest = RUNTIMES["vllm"](cell.config, None).max_length
    admitted = cell.recorded["largest_max_model_len_accepted_of_1024_4096_8192_16384"]
    assert max(length for length in TRIED if length <= largest) == admitted
    for length in TRIED:
        refused = RUNTIMES["vllm"](cell.config, length).error or ""
        assert ("greater than the derived" in refused) == (length > admitted)


@pytest.mark.parametrize(
    "cell",
    [c for c in CELLS if c.runtime == "sglang" and "default_context_length" in c.recorded],
    ids=lambda c: c.case,
)
def test_sglang_admits_its_context_length(cell):
    expected = cell.recorded["default_context_length"]
    assert RUNTIMES["sglang"](cell.config, None).max_length == expected
    refused = RUNTIMES["sglang"](cell.config, expected + 1).error or ""
    assert "greater than the derived" in refused


@pytest.mark.parametrize("runtime", ["transformers-4", "transformers-5", "mlx-lm", "llama.cpp"])
def test_the_others_admit_any_length(runtime):
    got = RUNTIMES[runtime](config("10_"), 1 << 20)
    assert got.error is None
    assert got.max_length is None


def test_every_case_has_answers_of_five_runtimes_or_more():
    counts = {}
    for cell in CELLS:
        counts[cell.case] = counts.get(cell.case, 0) + 1
    assert len(counts) == 57
    assert min(counts.values()) >= 5
    assert len(CELLS) > 330


def test_a_wrong_emulator_is_seen():
    """An error of 2e-6 in one number, another switch, or a missing refusal fails."""
    cell = next(c for c in CELLS if c.case.startswith("10_") and c.runtime == "vllm")
    emulate = RUNTIMES[cell.runtime]

    def wrong_with(**changes):
        return lambda *args: dataclasses.replace(emulate(*args), **changes)

    right = emulate(cell.config, None)
    layer = right.rotations["all"]
    f = layer.inv_freq
    slower = dataclasses.replace(layer, inv_freq=(*f[:-1], f[-1] * (1 + 2e-6)))
    hotter = dataclasses.replace(layer, multiplier=layer.multiplier * (1 + 2e-6))
    for changes in (
        {"rotations": {"all": slower}},
        {"rotations": {"all": hotter}},
        {"softmax_scale": float("nan")},
        {"switch": "start"},
        {"softmax_scale": 0.25001},
        {"error": "refused"},
    ):
        with pytest.raises(AssertionError):
            assert_reproduced(cell, wrong_with(**changes))
    refusing = next(c for c in CELLS if c.case.startswith("41_") and c.runtime == "sglang")
    with pytest.raises(AssertionError):
        assert_reproduced(refusing, emulate)


def test_mlx_lm_assumes_an_original_length_of_4096():
    """The golden heads are too small to tell 4096 from 2048."""
    raw = {**config("09_"), "head_dim": 128}
    got = RUNTIMES["mlx-lm"](raw, None).rotations["all"].inv_freq
    assert got == pytest.approx(yarn_frequencies(128, 10000.0, 4.0, 4096))
    assert got != pytest.approx(yarn_frequencies(128, 10000.0, 4.0, 2048))
