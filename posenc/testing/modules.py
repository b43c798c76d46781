"""Check encodings as modules: devices, state, several instances, options, wrong shapes."""

import inspect
import re

import torch

from posenc import masks
from posenc.encodings import ModelShape, PositionEncoding
from posenc.testing.harness import (
    SHAPE,
    Make,
    OneLayerModel,
    assert_same,
    build_encoding,
    build_example,
    build_layer,
    differs,
    possible_length,
    random_embeddings,
    successive_positions,
)


def assert_device_follows_input(make: Make) -> None:
    """Check that the layer runs on the meta device, whose tensors have no numbers."""
    model, x, positions = build_example(make, 9)
    out = model.to("meta")(x.to("meta"), positions.to("meta"))
    assert out.device.type == "meta" and out.shape == x.shape


def assert_meta_construction_materialises(make: Make) -> None:
    """Check that a layer built without memory (device "meta") gives the same results after
    `to_empty` and loading, and finite ones after `reset_parameters`."""
    want, x, positions = build_example(make, 9)
    with torch.device("meta"):
        bare = OneLayerModel(make(SHAPE), SHAPE).double()
    bare.to_empty(device="cpu")
    _fill_with_nan(bare)
    bare.load_state_dict(want.state_dict())
    assert_same(bare(x, positions), want(x, positions), "loaded after meta construction")
    _fill_with_nan(bare.encoding)
    for module in bare.modules():
        if isinstance(module, PositionEncoding):
            module.reset_parameters()
    for name, value in bare.encoding.state_dict().items():
        assert value.isfinite().all(), f"{name} after reset_parameters"
    assert bare(x, positions).isfinite().all()


def _fill_with_nan(module: torch.nn.Module) -> None:
    """Fill parameters and buffers with NaN, because uninitialised memory may have valid numbers."""
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.fill_(torch.nan)


def assert_state_dict_round_trip(make: Make) -> None:
    """Check that a layer that loads another one's state gives the same results."""
    first, x, positions = build_example(make)
    torch.manual_seed(9)  # another seed than the first layer's, so that weights must be loaded
    second = OneLayerModel(make(SHAPE), SHAPE).double()
    differing_keys = second.load_state_dict(first.state_dict())
    assert not differing_keys.missing_keys and not differing_keys.unexpected_keys
    assert torch.equal(second(x, positions), first(x, positions))


def assert_positions_survive_a_cast(make: Make) -> None:
    """Check that casting to bfloat16 and back to float64 rounds nothing but parameters."""
    model, x, positions = build_example(make)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    before = model(x, positions)
    after = model.to(torch.bfloat16).to(torch.float64)(x, positions)
    assert torch.equal(after, before), "a cast of the module changed its positions"


def assert_instances_share_nothing(make: Make) -> None:
    """Check that building and running other instances between two runs changes nothing."""
    first, x, positions = build_example(make, 9)
    want = first(x, positions)
    other_shape = ModelShape(embed_dim=96, num_heads=6, train_length=40)
    other = build_layer(make, other_shape)
    other(random_embeddings(len(positions), shape=other_shape), positions)
    assert torch.equal(first(x, positions), want)
    assert torch.equal(build_layer(make)(x, positions), want)


def numeric_options(make: Make) -> dict[str, float]:
    """Return the default of each numeric constructor argument that has one, by its name. True and
    False are no numbers."""
    cls = type(make(SHAPE))
    return {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
    }


def assert_no_option_is_ignored(make: Make, harmless: frozenset[str]) -> None:
    """Check that each numeric option changes the result, even after other instances ran. harmless:
    names of options that are left out."""
    length = possible_length(make(SHAPE))
    x = random_embeddings(length)
    for name, default in numeric_options(make).items():
        if name in harmless:
            continue
        # The first of three other values that the encoding accepts, with as many positions.
        for value in (2 * default, default + 2, default / 2):
            try:
                changed = make(SHAPE, **{name: type(default)(value)})  # type: ignore[call-arg]
            except ValueError:
                continue
            if value == default or changed.claims.max_positions not in (
                None,
                make(SHAPE).claims.max_positions,
            ):
                continue
            break
        else:
            continue
        positions = successive_positions(changed, length)
        # Far positions too, as some options act on them only; 97 is chosen, not derived.
        if changed.claims.num_axes == 1 and changed.claims.max_positions is None:
            positions = torch.where(positions < length // 2, positions, positions * 97)
        a = build_layer(make)(x, positions)
        b = build_layer(lambda shape, n=name, v=value, d=default: make(shape, **{n: type(d)(v)}))(  # type: ignore[call-arg]
            x, positions
        )
        assert differs(a, b), f"{name}={value} gives the same result as {name}={default}"


def assert_wrong_shapes_are_named(make: Make) -> None:
    """Check that another number or size of heads works, or raises a ValueError that states it."""
    encoding = build_encoding(make)
    length = possible_length(encoding, 5)
    positions = successive_positions(encoding, length)
    other = ModelShape(embed_dim=66, num_heads=6, train_length=24)  # head_dim 11
    try:
        odd = make(other)
    except ValueError as error:
        assert any(number in str(error) for number in ("11", "66")), error
    else:
        out = OneLayerModel(odd, other)(
            random_embeddings(length, shape=other, dtype=torch.float32), positions
        )
        assert out.isfinite().all()
    for count in (2, 8):  # the encoding was built for 4 heads of 16
        model = OneLayerModel(encoding, ModelShape(embed_dim=64, num_heads=count))
        try:
            out = model(random_embeddings(length, dtype=torch.float32), positions)
        except ValueError as error:
            assert any(re.search(rf"\b{n}\b", str(error)) for n in (count, 64 // count)), error
        else:
            assert out.isfinite().all()
            taken = {"num_heads", "head_dim"} & {*inspect.signature(type(encoding)).parameters}
            assert not taken, f"built for 4 heads, but runs with {count}"


def assert_masks_are_optional(make: Make) -> None:
    """Check that mask=None gives the same results as masks.full; skipped for encodings that are
    causal only."""
    model, x, positions = build_example(make, 9)
    if not model.encoding.claims.causal_only:
        assert_same(model(x, positions, None), model(x, positions, masks.full), "masks.full")
