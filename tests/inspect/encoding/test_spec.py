"""The spec sheet: measured values against what is known from the papers, and the command."""

import json
import math
import subprocess
import sys
import time

import pytest
import torch

from posenc import ALiBi, ModelShape, PositionEncoding, RoPE, create
from posenc.command_line.main import COMMANDS
from posenc.encodings.base.claims import Claims
from posenc.inspect.encoding import measurements, precision, scores
from posenc.inspect.encoding.measurements import measure
from posenc.inspect.encoding.report import properties_in_words
from posenc.testing.harness import add_parameter_noise, encoding_of_first_layer
from tests.compilers import traces_attributes
from tests.kinds import one_of_each_kind

SHAPE = ModelShape(embed_dim=64, num_heads=4, head_dim=16, train_length=128)


def build(name: str, shape: ModelShape = SHAPE, **options) -> PositionEncoding:
    torch.manual_seed(0)
    return encoding_of_first_layer(add_parameter_noise(create(name, shape, **options))).eval()


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", one_of_each_kind())
@torch.no_grad()
def test_measured_places_and_invariances_equal_the_claims(name):
    encoding = build(name)
    assert measurements.measure_places(encoding, SHAPE) == list(encoding.claims.places)
    gaps = measurements.measure_differences(encoding, SHAPE)
    holds = {key: gap < measurements.LARGEST_ROUNDING_DIFFERENCE for key, gap in gaps.items()}
    assert holds["padding"] and holds["packing"] and holds["batch"]
    assert holds["shift"] == encoding.claims.shift_invariant
    assert holds["cache"] == encoding.claims.cache_safe


class _FirstOfBatch(PositionEncoding):
    """Wrong on purpose: every row gets the positions of the first."""

    claims = Claims(places=(1,), causal_only=True)

    def embed(self, x, positions):
        rows = positions if positions.ndim == 2 else positions[None]
        return x + 0.1 * rows[:1, :, None]


class _ByIndex(PositionEncoding):
    """Wrong on purpose: looks at the place in memory."""

    claims = Claims(places=(1,), causal_only=True)

    def embed(self, x, positions):
        return x + 0.1 * torch.arange(x.shape[1])[:, None]


@torch.no_grad()
def test_wrong_encodings_are_seen():
    assert measurements.measure_differences(_FirstOfBatch(), SHAPE)["padding"] > 1e-3
    gaps = measurements.measure_differences(_ByIndex(), SHAPE)
    assert gaps["packing"] > 1e-3 and gaps["padding"] > 1e-3 and gaps["cache"] > 1e-3


class _Doubled(PositionEncoding):
    claims = Claims(places=(2,), causal_only=True)

    def transform(self, q, k):
        return 2 * q.x, k.x


@torch.no_grad()
def test_norms():
    low, high = measurements.norm_ratio_range(build("rope"), SHAPE) or (0, 0)
    assert low == pytest.approx(1, abs=1e-12) and high == pytest.approx(1, abs=1e-12)
    assert measurements.norm_ratio_range(_Doubled(), SHAPE) == pytest.approx((1.0, 2.0))
    assert measurements.norm_ratio_range(build("alibi"), SHAPE) is None


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "want"),
    [("nope", "blind"), ("alibi", "symmetric"), ("rope", "directed"), ("t5", "directed")],
)
def test_direction(name, want):
    assert scores.direction(build(name), SHAPE) == want


@torch.no_grad()
def test_t5_tells_apart_what_its_buckets_do():
    """Buckets 0 to 15 hold one distance each; the last begins at 113."""
    found = scores.resolution(build("t5"), SHAPE)
    assert found is not None
    assert (found["float32"].every, found["float32"].any) == (15, 112)


@torch.no_grad()
def test_resolution_of_interpolation_and_of_nothing():
    """Positions interpolated by 4 still differ; without positions nothing does."""
    found = scores.resolution(build("linear"), SHAPE)
    assert found is not None and found["float32"].every == scores.FARTHEST_DISTANCE
    nothing = scores.resolution(build("nope"), SHAPE)
    assert nothing is not None and nothing["bfloat16"].any == 0


@torch.no_grad()
def test_alibi_decays_by_its_slopes():
    decay = scores.decay(ALiBi(4), SHAPE)
    slope = sum(2.0**-i for i in (2, 4, 6, 8)) / 4
    for distance, mean in zip(decay.distances, decay.mean, strict=True):
        assert mean is not None and decay.mean[0] is not None
        assert mean - decay.mean[0] == pytest.approx(-slope * distance, abs=1e-3)
    assert decay.distances[-1] == SHAPE.train_length - 1


@torch.no_grad()
def test_means_over_strangers_hold_no_noise_of_products():
    """ALiBi's is its bias, to rounding; sinusoids add the product of two positions."""
    found = scores.decay(ALiBi(4), SHAPE, num_pairs=8)
    slope = sum(2.0**-i for i in (2, 4, 6, 8)) / 4
    for distance, mean, error in zip(found.distances, found.mean, found.mean_error, strict=True):
        assert mean == pytest.approx(-slope * distance, rel=1e-5, abs=1e-6)  # six digits are kept
        assert error == pytest.approx(0, abs=1e-9)
    of_rope = scores.decay(RoPE(16, interleaved=False), SHAPE).mean_error[1]
    assert of_rope == pytest.approx(0, abs=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cope", "fox"])
def test_a_stranger_at_distance_zero_is_no_equal(name):
    """Methods that read the tokens between got the score of the query with itself, 4.0."""
    found = scores.decay(build(name), SHAPE)
    assert found.same[0] is not None and found.same[0] > 3
    mean, error = found.mean[0], found.mean_error[0]
    assert mean is not None and error is not None and abs(mean) <= max(4 * error, 0.3)


@torch.no_grad()
def test_standard_errors_are_those_of_the_mean():
    """Twenty means of other vectors scatter by as much as one of them says of itself."""
    means = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        means.append(torch.randn(64, 2, 1, generator=generator, dtype=torch.float64))
    said = torch.stack([scores._standard_error(m, 64) for m in means]).mean()
    scatter = torch.stack([m.mean() for m in means]).std()
    assert 0.6 < scatter / said < 1.6


@pytest.fixture
def quick(monkeypatch):
    """Sheets without what takes long and is tested elsewhere."""
    monkeypatch.setattr(measurements, "compile_outcome", lambda *_: "yes")
    monkeypatch.setattr(measurements, "export_outcome", lambda *_: "yes")
    monkeypatch.setattr(measurements, "relative_forward_time", lambda *_: (0.9, 1.0, 1.1))
    monkeypatch.setattr(measurements, "measure_differences", lambda *_: dict.fromkeys(KEYS, 0.0))


KEYS = ("shift", "padding", "packing", "batch", "cache")


def test_two_axes_are_measured_against_the_side_of_their_grid(quick):
    """A grid of 46 by 46 holds 2,048 cells: 18 of 32 pairs complete no turn on it."""
    found = measure("axial_rope", ModelShape(embed_dim=512, num_heads=8, train_length=2048))
    assert found.axis_length == 46 and len(found.unfinished_pairs) == 18
    assert "18 of 32" in properties_in_words(found)["unfinished pairs"]
    assert "on an axis of 46" in properties_in_words(found)["unfinished pairs"]


def test_scaling_is_named_and_what_is_untrained_is_called_so(quick):
    found = properties_in_words(measure("yarn", SHAPE))
    assert found["scaling"].startswith("YaRN(factor=") and "untrained" not in found["parameters"]
    assert "untrained here" in properties_in_words(measure("t5", SHAPE))["parameters"]
    assert "scaling" not in properties_in_words(measure("rope", SHAPE))


def test_an_encoding_costs_itself(monkeypatch):
    """By a clock that goes on by one second at each look, and by two in the encoding's work."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    class Slow(PositionEncoding):
        claims = Claims(places=(1,), causal_only=True)

        def embed(self, x, positions):
            now[0] += 2.0
            return x

    monkeypatch.setattr(time, "perf_counter", look)
    assert measurements.relative_forward_time(PositionEncoding(), SHAPE) == (1.0, 1.0, 1.0)
    assert measurements.relative_forward_time(Slow(), SHAPE) == (3.0, 3.0, 3.0)


@torch.no_grad()
def test_rope_of_equal_vectors_is_a_sum_of_cosines():
    """Averaged over isotropic vectors, the score at D is proportional to sum_t cos(D w_t)."""
    decay = scores.decay(RoPE(16, interleaved=False), SHAPE, num_pairs=400)
    start = decay.same[0]
    assert start is not None
    for distance, value in zip(decay.distances, decay.same, strict=True):
        want = sum(math.cos(distance * 10000 ** (-t / 8)) for t in range(8)) / 8
        assert value is not None and value / start == pytest.approx(want, abs=0.03)


@torch.no_grad()
def test_windows_hide_far_keys():
    decay = scores.decay(build("rnope_swa"), SHAPE)
    assert None in decay.mean and decay.mean[0] is not None


def test_precision_of_plain_arithmetic():
    """bfloat16 holds whole numbers to 256 only; float32 angles are off by half an ulp of the
    product, 1e-3 between 2^14 and 2^16."""
    found = precision.measure(RoPE(64, interleaved=False))
    assert found is not None
    assert found.as_used == precision.LAST_TESTED_POSITION
    assert 2**14 <= found.plain["float32"] <= 2**16
    assert found.plain["bfloat16"] <= 2
    assert precision.measure(ALiBi(4)) is None


def test_reach_ends_before_the_first_wrong_angle_also_where_it_is_no_number():
    positions = torch.tensor([1, 3, 7, 9])
    for wrong in (1.0, math.nan):
        errors = torch.tensor([[0.0], [1e-4], [wrong], [0.0]])
        assert precision._last_exact_position(positions, errors) == 3
    assert precision._last_exact_position(positions, torch.zeros(4, 1)) == 9
    assert precision._last_exact_position(positions, torch.ones(4, 1)) == 0


def test_neighbours_collide_where_a_dtype_holds_no_odd_numbers():
    """Eight bits of mantissa hold whole numbers to 2^8, twenty-four to 2^24."""
    found = precision.measure(RoPE(64, interleaved=False))
    assert found is not None and set(found.apart["as used"]) == {1.0}
    for name, last in (("plain bfloat16", 8), ("plain float32", 24)):
        shares = dict(zip(found.starts, found.apart[name], strict=True))
        assert shares[2 ** (last - 1)] == 1
        assert [shares[2 ** (last + i)] for i in range(3)] == [0.5, 0.25, 0.125]


def test_precision_sees_a_wrong_frequency():
    rope = RoPE(16, interleaved=False)
    rope.exact_frequencies.units_per_position = RoPE(
        16, rope_theta=10000.01, interleaved=False
    ).exact_frequencies.units_per_position
    found = precision.measure(rope)
    assert found is not None and found.as_used < 100_000


def test_what_does_not_trace_is_named():
    class Reads(PositionEncoding):
        claims = Claims(places=(1,), causal_only=True)

        def embed(self, x, positions):
            return x if x.sum() > 0 else 2 * x

    assert measurements.compile_outcome(Reads(), SHAPE).startswith("no: ")
    assert measurements.export_outcome(Reads(), SHAPE).startswith("no: ")


def test_what_cannot_be_compiled_is_exported_by_running_it():
    class Breaks(PositionEncoding):
        claims = Claims(places=(1,), source="test")

        def embed(self, x, positions):
            torch._dynamo.graph_break()
            return x + positions[..., None].cos()

    assert measurements.compile_outcome(Breaks(), SHAPE).startswith("no: ")
    assert measurements.export_outcome(Breaks(), SHAPE) == "yes"


@pytest.mark.slow
def test_json_has_an_object_for_each_encoding(call):
    options = ["--json", "--head-dim", "8", "--heads", "2", "--train-length", "32"]
    code, out, _ = call("inspect", "encoding", "p_rope", *options)
    assert code == 0
    (sheet,) = json.loads(out)["encodings"]
    assert sheet["places"] == [2] and sheet["parameters"] == 0
    assert sheet["exports"] == "yes"
    assert (sheet["compiles"] == "yes") == traces_attributes(), sheet["compiles"]
    assert sheet["unfinished_pairs"] == [1, 2, 3] and sheet["num_pairs"] == 4
    assert sheet["wavelengths"][3] is None  # p_rope leaves the slowest quarter unrotated
    low, middle, high = sheet["cost"]
    assert 0 < low <= middle <= high


def test_bad_input_is_one_line_and_2(call):
    for arguments in (["rop"], ["rope", "--head-dim", "7"]):
        code, out, err = call("inspect", "encoding", *arguments)
        assert code == 2 and err.count("\n") == 1 and not out


def test_command_module_is_light():
    code = f"import {COMMANDS['inspect'].partition(':')[0]}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_what_does_not_fit_in_memory_is_refused_before_anything_is_made(name, monkeypatch, call):
    monkeypatch.setattr("posenc.inspect.api.memory_bytes", lambda: 2**30)
    monkeypatch.setattr("posenc.inspect.api.measure", None)
    head_dim = 2 if name == "alibi" else 16
    code, out, err = call("inspect", "encoding", name, "--heads", 512, "--head-dim", head_dim)
    assert code == 2 and not out and "1.0 GiB" in err and "fewer --heads" in err, err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("positions", "farthest"), [(100, 98), (200_000, 2**16)])
def test_no_distance_is_beyond_the_last_position_or_the_farthest_one(positions, farthest):
    encoding = create("learned", ModelShape(4, 1, train_length=positions))
    assert encoding.claims.max_positions == positions
    assert scores._tested_distances(encoding)[-1] == farthest
