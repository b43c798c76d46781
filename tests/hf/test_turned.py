"""from_config turns queries and keys as the functions of each family in transformers do: which
channels form a pair, in which direction, and which axis a pair counts."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import posenc
from posenc.runtimes.families import FAMILIES_ALTERNATING_AXES, FAMILIES_OF_CONTIGUOUS_AXES
from tests.hf_models import transformers

FOLDER = Path(transformers.__file__).parent / "models"
TURN = re.compile(r"^def (apply_\w*rotary_pos_emb)\(q, k, cos, sin\b", re.MULTILINE)
ROTATION = re.compile(r"^class (\w+RotaryEmbedding)\(nn\.Module\):", re.MULTILINE)
LENGTH = 9


class Family(NamedTuple):
    """A file of transformers with one rotation of text and one function that turns by it."""

    module: str
    rotation: str
    turn: str


def families() -> list[Family]:
    found = []
    for path in sorted(FOLDER.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        turns = TURN.findall(source)
        rotations = [name for name in ROTATION.findall(source) if "Vision" not in name]
        if len(turns) == 1 and len(rotations) == 1:
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            found.append(Family(name, rotations[0], turns[0]))
    return found


def config_of(rotation: type, module: Any) -> Any:
    """The default config of the class that the rotation takes; None if it names none."""
    parameter = inspect.signature(rotation.__init__).parameters.get("config")
    named = None if parameter is None else parameter.annotation
    named = getattr(module, named, None) if isinstance(named, str) else named
    is_named = inspect.isclass(named) and named is not inspect.Parameter.empty
    default: Any = named() if is_named else None
    return None if default is None else default.get_text_config()


def size_of(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def turn_of(family: Family, module: Any, config: Any) -> Callable:
    """The function that turns. DeepSeek's families have another one for neighbouring channels, and
    take the first only for an indexer, or where the config says so."""
    in_pairs = getattr(module, "apply_rotary_pos_emb_interleave", None)
    if in_pairs is not None and getattr(config, "rope_interleave", True):
        return in_pairs
    return getattr(module, family.turn)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def turned(turn: Callable, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Their scores; channels beyond those that cos and sin turn are left as they are."""
    width = cos.shape[-1]
    new_q, new_k = turn(q[..., :width], k[..., :width], cos, sin)
    rest = scores(q[..., width:], k[..., width:])
    return scores(new_q, new_k) + rest


@pytest.mark.slow
@pytest.mark.parametrize("family", families(), ids=lambda family: family.rotation)
def test_scores_are_those_of_the_familys_own_functions(family):
    module = importlib.import_module(family.module)
    rotation = getattr(module, family.rotation)
    try:
        config = config_of(rotation, module)
    except ImportError as error:
        pytest.skip(f"its config needs another package: {str(error).strip()[:80]}")
    if config is None:
        pytest.skip("its rotation names no config")
    try:
        encoding = posenc.RoPE.from_config(config)
    except ValueError as error:
        pytest.skip(f"refused: {str(error)[:150]}")
    q, k = torch.randn(2, 1, 2, LENGTH, size_of(config))
    positions = torch.arange(LENGTH)
    try:
        cos, sin = rotation(config)(q, positions[None])
        wanted = turned(turn_of(family, module, config), q, k, cos, sin)
    except (TypeError, RuntimeError, IndexError) as error:
        pytest.skip(f"is called in another way: {str(error)[:100]}")
    torch.testing.assert_close(scores(*encoding(q, k, positions)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.quick(17)  # every family once, with and without the key
@pytest.mark.parametrize("interleaved", [None, True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES_ALTERNATING_AXES | FAMILIES_OF_CONTIGUOUS_AXES))
def test_axes_are_those_of_the_family_whatever_mrope_interleaved_says(family, interleaved):
    """transformers does not read the key."""
    try:
        config = transformers.AutoConfig.for_model(family)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    config.head_dim = head_dim = 128
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    rotation = rotation_of_axes(module, config)
    parameters = {"rope_type": "default", "rope_theta": 1e4, **(config.rope_parameters or {})}
    pairs = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    third = pairs // 3
    parameters["mrope_section"] = [pairs - 2 * third, third, third]
    if interleaved is not None:
        parameters["mrope_interleaved"] = interleaved
    config.rope_parameters = parameters
    encoding = posenc.MRoPE.from_config(config)
    q, k = torch.randn(2, 1, 2, LENGTH, head_dim)
    places = torch.randint(0, 50, (3, 1, LENGTH))
    cos, sin = rotation(config)(q, places)
    if cos.ndim == 4:  # early transformers 5 chooses the axis of each pair where it rotates
        turn = module.apply_multimodal_rotary_pos_emb
        wanted_q, wanted_k = turn(q, k, cos, sin, parameters["mrope_section"])
    else:
        wanted_q, wanted_k = module.apply_rotary_pos_emb(q, k, cos, sin)
    got_q, got_k = encoding(q, k, places.permute(1, 2, 0))
    torch.testing.assert_close(got_q, wanted_q, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_k, wanted_k, rtol=1e-4, atol=1e-4)


def rotation_of_axes(module: Any, config: Any) -> type:
    """The rotation of a file that takes this config, and reads mrope_section if any does: early
    transformers 5 reads it only where it rotates."""
    rotations = [
        value
        for name, value in vars(module).items()
        if name.endswith("RotaryEmbedding")
        and "Vision" not in name
        and value.__module__ == module.__name__
        and accepts(value, config)
    ]
    return max(rotations, key=lambda kind: "mrope_section" in inspect.getsource(kind))


def accepts(rotation: type, config: Any) -> bool:
    """Whether a rotation can be built from a config of this class."""
    try:
        rotation(config)
    except Exception:  # of transformers, for another model's config
        return False
    return True


def test_sections_of_a_family_that_nobody_has_read_are_refused():
    config = transformers.AutoConfig.for_model("ernie4_5_vl_moe").to_dict()
    text = config["text_config"]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [20] * 3}
    with pytest.raises(ValueError, match="gives pairs to the axes of mrope_section is not known"):
        posenc.MRoPE.from_config(config)


def test_a_family_that_rotates_the_other_way_round_is_refused():
    config = {"model_type": "nanochat", "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="nanochat rotates the other way round"):
        posenc.RoPE.from_config(config)
