"""Learned tables resized to other grids, as the vision encoders of transformers resize theirs."""

import pytest
import torch

from posenc import Learned2D
from posenc.encodings.embeddings.grow import interpolate_2d
from posenc.positions import grid

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIDE = 6  # of the table, in patches of one pixel
DIM = 8
SIZES = [(3, 9), (6, 6), (11, 7), (2, 4)]
SMALL = {
    "hidden_size": DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def with_random_table(module: torch.nn.Module, table: torch.nn.Parameter) -> torch.nn.Module:
    """The module with zeros for all parameters but its table, so that it returns positions only."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        table.normal_()
    return module.eval()


def resized(
    table: torch.Tensor, size: tuple[int, int], extra_rows: int = 0, **options
) -> torch.Tensor:
    """The rows that Learned2D.resize adds to the cells of a grid of this size, after the extra
    rows."""
    learned = Learned2D(SIDE, SIDE, DIM)
    with torch.no_grad():
        learned.weight.copy_(table[extra_rows:])
    bigger = learned.resize(*size, **options)
    cells = grid(*size, class_tokens=extra_rows)
    added = bigger(torch.zeros(1, len(cells), DIM), cells)[0]
    added[:extra_rows] = table[:extra_rows]
    in_one = interpolate_2d(table, (SIDE, SIDE), size, extra_rows=extra_rows, **options)
    assert torch.equal(in_one, added)
    return added.detach()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ViT", {}),
        ("Dinov2", {}),
        ("Dinov2WithRegisters", {"antialias": True}),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_vit_and_dinov2(family: str, options, size: tuple[int, int]):
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(image_size=SIDE, patch_size=1, num_channels=1, **SMALL)
    model = getattr(transformers, f"{family}Model")(config)
    table = model.embeddings.position_embeddings
    embeddings = with_random_table(model.embeddings, table)
    pixels = torch.zeros(1, 1, *size)
    interpolates = {"interpolate_pos_encoding": True} if family == "ViT" else {}
    with torch.no_grad():
        theirs = embeddings(pixels, **interpolates)[0]
    num_registers = getattr(config, "num_register_tokens", 0)
    theirs = torch.cat([theirs[:1], theirs[1 + num_registers :]])
    ours = resized(table[0], size, extra_rows=1, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_siglip_2(size: tuple[int, int]):
    config = transformers.Siglip2VisionConfig(
        num_patches=SIDE**2, patch_size=1, num_channels=1, **SMALL
    )
    model = transformers.Siglip2VisionModel(config)
    embeddings = next(m for m in model.modules() if hasattr(m, "position_embedding"))
    with_random_table(embeddings, embeddings.position_embedding.weight)
    num_cells = size[0] * size[1]
    with torch.no_grad():
        theirs = embeddings(torch.zeros(1, num_cells, 1), torch.tensor([size]))[0]
    table = embeddings.position_embedding.weight
    ours = resized(table, size, mode="bilinear", antialias=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_qwen3_vl(size: tuple[int, int]):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=1,
        hidden_size=DIM,
        num_heads=2,
        intermediate_size=8,
        out_hidden_size=8,
        in_channels=1,
        patch_size=1,
        temporal_patch_size=1,
        spatial_merge_size=1,
        num_position_embeddings=SIDE**2,
        deepstack_visual_indexes=[],
    )
    model = Qwen3VLVisionModel(config)
    with_random_table(model, model.pos_embed.weight)
    into_first_block = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: into_first_block.append(inputs[0]))
    with torch.no_grad():
        model(torch.zeros(size[0] * size[1], 1), torch.tensor([[1, *size]]))
    ours = resized(model.pos_embed.weight, size, mode="bilinear", align_corners=True)
    torch.testing.assert_close(ours, into_first_block[0], rtol=1e-5, atol=1e-5)


def test_sizes_and_options_that_do_not_fit_are_refused():
    learned = Learned2D(SIDE, SIDE, DIM)
    with pytest.raises(ValueError, match="mode must be 'bicubic' or 'bilinear', got 'nearest'"):
        learned.resize(3, 3, mode="nearest")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="give align_corners or antialias, not both"):
        learned.resize(3, 3, align_corners=True, antialias=True)
    with pytest.raises(ValueError, match="height must be at least 1, got 0"):
        learned.resize(0, 3)
    grids = ((SIDE, SIDE), (3, 3))
    said = r"a grid of 6 x 6 and 0 extra rows has shape \(36, dim\), got "
    for table, shape in ((torch.zeros(37, DIM), r"\(37, 8\)"), (torch.zeros(36), r"\(36,\)")):
        with pytest.raises(ValueError, match=said + shape):
            interpolate_2d(table, *grids)
    with pytest.raises(ValueError, match="extra_rows must be at least 0, got -1"):
        interpolate_2d(torch.zeros(36, DIM), *grids, extra_rows=-1)
    with pytest.raises(TypeError, match=r"height of new_grid must be a whole number, got 3\.5"):
        interpolate_2d(torch.zeros(36, DIM), (SIDE, SIDE), (3.5, 3))  # pyright: ignore
    with pytest.raises(TypeError, match=r"old_grid must be \(height, width\), got \(6, 6, 1\)"):
        interpolate_2d(torch.zeros(36, DIM), (SIDE, SIDE, 1), (3, 3))  # pyright: ignore
