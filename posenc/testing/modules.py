"""Check encodings as modules: devices, state, several instances, options, wrong shapes, and modes.

With frozen parameters, in inference mode and without gradients of the inputs, other code runs than
in training. Its results must be those of training in every implementation, also where new memory is
full of NaN or large numbers.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from posenc import masks
from posenc.attend.cache import KVCache
from posenc.attend.choose import WAYS
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
    model, x, positions = build_example(make, 9)
    with torch.device("meta"):
        bare_model = OneLayerModel(make(SHAPE), SHAPE).double()
    bare_model.to_empty(device="cpu")
    _fill_with_nan(bare_model)
    bare_model.load_state_dict(model.state_dict())
    assert_same(bare_model(x, positions), model(x, positions), "loaded after meta construction")
    _fill_with_nan(bare_model.encoding)
    for module in bare_model.modules():
        if isinstance(module, PositionEncoding):
            module.reset_parameters()
    for name, value in bare_model.encoding.state_dict().items():
        assert value.isfinite().all(), f"{name} after reset_parameters"
    assert bare_model(x, positions).isfinite().all()


def _fill_with_nan(module: torch.nn.Module) -> None:
    """Fill parameters and buffers with NaN, because uninitialised memory may have valid numbers."""
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.fill_(torch.nan)


def assert_state_dict_round_trip(make: Make) -> None:
    """Check that a layer that loads another one's state gives the same results."""
    first_model, x, positions = build_example(make)
    torch.manual_seed(9)  # another seed than the first layer's, so that weights must be loaded
    second_model = OneLayerModel(make(SHAPE), SHAPE).double()
    differing_keys = second_model.load_state_dict(first_model.state_dict())
    assert not differing_keys.missing_keys and not differing_keys.unexpected_keys
    assert torch.equal(second_model(x, positions), first_model(x, positions))


def assert_positions_survive_a_cast(make: Make) -> None:
    """Check that casting the encoding to bfloat16 and back to float64 rounds only its parameters,
    not its tables and constants."""
    model, x, positions = build_example(make)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    output_before = model(x, positions)
    output_after = model.to(torch.bfloat16).to(torch.float64)(x, positions)
    assert torch.equal(output_after, output_before), "a cast of the module changed its positions"


def assert_instances_share_nothing(make: Make) -> None:
    """Check that a layer gives the same results after other instances of the encoding were built
    and run."""
    model, x, positions = build_example(make, 9)
    expected = model(x, positions)
    other_shape = ModelShape(embed_dim=96, num_heads=6, train_length=40)
    other_model = build_layer(make, other_shape)
    other_model(random_embeddings(len(positions), shape=other_shape), positions)
    assert torch.equal(model(x, positions), expected)
    assert torch.equal(build_layer(make)(x, positions), expected)


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
    """Check that a change of each numeric option changes the result, even after other instances
    ran. harmless: names of options that are not checked."""
    length = possible_length(make(SHAPE))
    x = random_embeddings(length)
    for name, default in numeric_options(make).items():
        if name in harmless:
            continue
        # The first of three other values that the encoding accepts, with as many positions.
        for value in (2 * default, default + 2, default / 2):
            try:
                changed_encoding = make(SHAPE, **{name: type(default)(value)})  # type: ignore[call-arg]
            except ValueError:
                continue
            if value == default or changed_encoding.claims.max_positions not in (
                None,
                make(SHAPE).claims.max_positions,
            ):
                continue
            break
        else:
            continue
        positions = successive_positions(changed_encoding, length)
        # Far positions too, as some options act on them only; 97 is chosen, not derived.
        if changed_encoding.claims.num_axes == 1 and changed_encoding.claims.max_positions is None:
            positions = torch.where(positions < length // 2, positions, positions * 97)
        default_output = build_layer(make)(x, positions)
        changed_output = build_layer(
            lambda shape, n=name, v=value, d=default: make(shape, **{n: type(d)(v)})  # type: ignore[call-arg]
        )(x, positions)
        assert differs(default_output, changed_output), (
            f"{name}={value} gives the same result as {name}={default}"
        )


def assert_wrong_shapes_are_named(make: Make) -> None:
    """Check that inputs with another number of heads, or another size of heads, either work or
    raise a ValueError whose message has that number."""
    encoding = build_encoding(make)
    length = possible_length(encoding, 5)
    positions = successive_positions(encoding, length)
    other_shape = ModelShape(embed_dim=66, num_heads=6, train_length=24)  # head_dim 11
    try:
        odd_encoding = make(other_shape)
    except ValueError as error:
        assert any(number in str(error) for number in ("11", "66")), error
    else:
        out = OneLayerModel(odd_encoding, other_shape)(
            random_embeddings(length, shape=other_shape, dtype=torch.float32), positions
        )
        assert out.isfinite().all()
    for num_heads in (2, 8):  # the encoding was built for 4 heads of 16
        model = OneLayerModel(encoding, ModelShape(embed_dim=64, num_heads=num_heads))
        try:
            out = model(random_embeddings(length, dtype=torch.float32), positions)
        except ValueError as error:
            assert any(re.search(rf"\b{n}\b", str(error)) for n in (num_heads, 64 // num_heads)), (
                error
            )
        else:
            assert out.isfinite().all()
            head_options = {"num_heads", "head_dim"} & {
                *inspect.signature(type(encoding)).parameters
            }
            assert not head_options, f"built for 4 heads, but runs with {num_heads}"


def assert_masks_are_optional(make: Make) -> None:
    """Check that mask=None gives the same results as masks.full; skipped for encodings that are
    causal only."""
    model, x, positions = build_example(make, 9)
    if not model.encoding.claims.causal_only:
        assert_same(model(x, positions, None), model(x, positions, masks.full), "masks.full")


MODE_CHECK_LENGTH = 130
"""Tokens of the checks of modes: enough for several blocks of queries and for tables by
distance."""
MODE_CHECK_BATCH = 4
"""Rows of the batch in the checks of modes."""
MODE_CHECK_BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Maximum error relative to the largest number, in the checks of modes. Implementations are
selected by name in float64 only, in which FlexAttention cannot run: it would compile for
seconds."""

RunInSetting = Callable[[OneLayerModel, Tensor], list[Tensor]]
"""Takes a layer and embeddings. Returns the layer's outputs in a mode such as inference, and after
them gradients of the encoding's parameters if the mode has any."""


def assert_frozen_parameters_change_nothing(make: Make) -> None:
    """Check that results in grad mode stay the same if no parameter requires gradients."""
    _assert_unchanged_in(
        make, lambda model, x: _whole_and_decoded_outputs(model.requires_grad_(False), x)
    )


def assert_inference_mode_changes_nothing(make: Make) -> None:
    """Check that results in torch.inference_mode are those of grad mode."""

    def infer(model: OneLayerModel, x: Tensor) -> list[Tensor]:
        """Return the layer's outputs in torch.inference_mode."""
        with torch.inference_mode():
            return _whole_and_decoded_outputs(model, x)

    _assert_unchanged_in(make, infer)


def assert_inputs_need_no_gradient(make: Make) -> None:
    """Check that results and gradients stay the same if only the encoding's parameters require
    gradients, and q, k and v do not."""

    def run_with_frozen_inputs(model: OneLayerModel, x: Tensor) -> list[Tensor]:
        """Return outputs and gradients of a layer in which only the encoding's parameters require
        gradients."""
        model.attention.requires_grad_(False)
        return _outputs_and_gradients(model, x)

    _assert_unchanged_in(make, run_with_frozen_inputs)


def _assert_unchanged_in(make: Make, run_in_setting: RunInSetting) -> None:
    """Assert that a layer has the same outputs and gradients in a mode as in training, in each
    dtype and implementation, also if new memory is full of NaN or large numbers.

    run_in_setting: runs the layer in the mode. In training, the reference here, all inputs and
    parameters require gradients.
    """
    for dtype, bound in MODE_CHECK_BOUNDS.items():
        encoding = build_encoding(make, dtype=dtype)
        model = OneLayerModel(encoding, SHAPE, "reference").to(dtype)
        x = random_embeddings(
            possible_length(encoding, MODE_CHECK_LENGTH), batch=MODE_CHECK_BATCH, dtype=dtype
        )
        expected_results = _outputs_and_gradients(model, x.clone().requires_grad_())
        for impl in ("auto", *(WAYS if dtype == torch.float64 else ())):
            model.attention.impl = impl
            for spoil_memory in (
                _fill_new_memory_with_nan,
                _fill_freed_memory_with_large_numbers,
            ):
                try:
                    with spoil_memory():
                        results = run_in_setting(model, x)
                except ValueError as refusal:
                    if "cannot run" not in str(refusal):
                        raise
                    continue
                # A setting without gradients returns outputs only, which come first.
                for got, expected in zip(results, expected_results, strict=False):
                    max_error = bound * max(1.0, expected.abs().max().item())
                    error = (got - expected).abs().max().item()
                    assert error <= max_error, (
                        f"{impl} in {dtype}: off by {error:.3g} > {max_error:.3g}"
                    )


def _whole_and_decoded_outputs(model: OneLayerModel, x: Tensor) -> list[Tensor]:
    """Return the outputs of a whole sequence, and of its last token decoded with a cache."""
    length = x.shape[1]
    positions = successive_positions(model.encoding, length)
    cache = KVCache()
    model(x[:, :-1], positions[:-1], cache=cache, length=length)
    decoded_output = model(x[:, -1:], positions[-1:], cache=cache, length=length)
    return [model(x, positions, length=length), decoded_output]


def _outputs_and_gradients(model: OneLayerModel, x: Tensor) -> list[Tensor]:
    """Return the outputs of `_whole_and_decoded_outputs`, then the gradient of each parameter of
    the encoding, 0 for an unused one."""
    outputs = _whole_and_decoded_outputs(model, x)
    parameters = [p for p in model.encoding.parameters() if p.requires_grad]
    if not parameters:
        return outputs
    loss = torch.stack([out.square().sum() for out in outputs]).sum()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return outputs + [
        p.new_zeros(()) if gradient is None else gradient
        for p, gradient in zip(parameters, gradients, strict=True)
    ]


@contextmanager
def _fill_new_memory_with_nan() -> Iterator[None]:
    """Let torch fill new memory with NaN inside the block: it does so with deterministic
    algorithms."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warning_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning_only)


@contextmanager
def _fill_freed_memory_with_large_numbers() -> Iterator[None]:
    """Before the block, fill memory of many sizes with large numbers and free it, so that the block
    gets it again."""
    # Blocks of 128 to 393,216 numbers, in steps of 1.5 or less: the allocator gives them again.
    tensors = [torch.full((count << size,), 1e30) for size in range(6, 18) for count in (2, 3)]
    del tensors
    yield
