"""The cookbook's tasks: each runs on its own and has at most twelve lines."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import posenc
from posenc.testing import CHECKS, maker, verdicts
from tests.attend.test_shards import free_port
from tests.nn.test_vision import Stock

ROOT = Path(__file__).parents[1]
START, *TASKS = re.split(
    r"^## ", (ROOT / "docs/cookbook.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = {task.partition("\n")[0]: BLOCK.findall(task)[0] for task in TASKS}
(IMPORTS,) = BLOCK.findall(START)


def run(title, imports=IMPORTS):
    torch.manual_seed(0)
    scope = {}
    exec(compile(imports + CODE[title], "docs/cookbook.md", "exec"), scope)
    torch.compiler.reset()
    return scope


def test_there_are_thirty_three_tasks_and_the_list_names_each():
    titles = [task.partition("\n")[0] for task in TASKS]
    assert len(titles) == 33 and START.partition("\n\n")[2].startswith("Thirty-three tasks")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "[cookbook](docs/cookbook.md) has thirty-three tasks" in changes
    listed = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|", START, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert listed == list(zip(titles, anchors, strict=True))
    for document in ("README.md", "README.zh-CN.md", "docs/README.md"):
        assert "cookbook.md" in (ROOT / document).read_text(encoding="utf-8"), document


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.partition("\n")[0])
def test_a_task_has_at_most_twelve_lines(task):
    (code,) = BLOCK.findall(task)
    assert sum(bool(line) for line in code.splitlines()) <= 12


PUBLIC_QUESTIONS = (
    "A window with sinks",
    "Join fragments of a cache",
    "What cannot be moved",
    "Vision Transformer",
    "Video generators",
    "Image generators",
    "DINOv3",
    "Resize a table of patches",
    "Swin's shifted windows",
    "SwinV2 in a larger window",
    "timm",
    "A Conformer's relative positions",
    "Falcon's ALiBi",
    "MPNet's bias",
)
"""What people asked in public."""


@pytest.mark.parametrize("title", PUBLIC_QUESTIONS)
def test_a_public_question_is_answered_in_eight_lines(title):
    # A line that only checks the answer is none of it.
    lines = [line for line in CODE[title].splitlines() if line and not line.startswith("assert")]
    assert len(lines) <= 8


SEPARATE = ("RoPE in flash-attn", "timm", "Sharding with FSDP2", "Keras", "JAX")
"""Tasks that need another package or a process of their own."""


@pytest.mark.quick(6)
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("title", [title for title in CODE if title not in SEPARATE])
def test_a_task_runs(title):
    run(title)


def test_the_rotation_of_ones_own_is_a_rope_that_passes_the_contract():
    mine = run("A rotation of your own")["MyRotation"]
    rope = posenc.RoPE(16, rope_theta=500.0, interleaved=False)
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    where = {"q_positions": range(9), "kv_positions": range(9), "mask": posenc.masks.causal}
    out = posenc.attention(q, k, v, mine(), **where)
    torch.testing.assert_close(out, posenc.attention(q, k, v, rope, **where), rtol=0, atol=1e-5)
    failed = {v.check: v.failure for v in verdicts(maker(mine), CHECKS) if v.failure}
    assert failed == {}


def flash_attention(causal_is=True):
    """A module with flash-attn's two functions, which need a GPU, computed by torch."""

    def one(q, k, v, causal=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal and causal_is)
        return out.transpose(1, 2)

    def varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, causal=False):
        assert ends_q.dtype == ends_k.dtype == torch.int32 and torch.equal(ends_q, ends_k)
        assert longest_q == longest_k == ends_q.diff().max() and q.ndim == k.ndim == v.ndim == 3
        parts = [
            one(*(x[None, first:last] for x in (q, k, v)), causal=causal)[0]
            for first, last in ends_q.unfold(0, 2, 1).tolist()
        ]
        return torch.cat(parts)

    module = types.ModuleType("flash_attn")
    module.__dict__.update(flash_attn_func=one, flash_attn_varlen_func=varlen)
    return module


def assert_flash_task_is_attention():
    scope = run("RoPE in flash-attn")
    q, k, v, rope = (scope[name] for name in ("q", "k", "v", "rope"))
    for out, first, last in (
        (scope["out"], 0, 9),
        (scope["packed"][None, :4], 0, 4),
        (scope["packed"][None, 4:], 4, 9),
    ):
        q2, k2, v2 = (x[:, first:last] for x in (q, k, v))
        p = range(last - first)
        where = {"q_positions": p, "kv_positions": p, "mask": posenc.masks.causal}
        want = posenc.attention(q2, k2, v2, rope, **where, layout="bthd")
        torch.testing.assert_close(out, want, rtol=0, atol=1e-5)


def test_rope_in_flash_attn_is_posencs_attention(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attention())
    assert_flash_task_is_attention()


def test_flash_attn_without_a_causal_mask_is_seen(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attention(causal_is=False))
    with pytest.raises(AssertionError):
        assert_flash_task_is_attention()


class VisionTransformer(torch.nn.Module):
    """A model with the parts of timm's that posenc reads."""

    num_prefix_tokens = 1

    def __init__(self, img_size, patch_size, embed_dim, depth, num_heads, num_classes, pos_embed):
        super().__init__()
        assert pos_embed == "none"
        side = img_size // patch_size
        self.patch_embed = torch.nn.Conv2d(3, embed_dim, patch_size, patch_size)
        setattr(self.patch_embed, "grid_size", (side, side))  # noqa: B010
        self.cls_token = torch.nn.Parameter(torch.randn(1, 1, embed_dim))
        self.blocks = torch.nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(torch.nn.Module())
            self.blocks[-1].attn = Stock(embed_dim, num_heads)
        self.head = torch.nn.Linear(embed_dim, num_classes)

    def forward(self, image):
        patches = self.patch_embed(image).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1)
        for block in self.blocks:
            x = x + block.get_submodule("attn")(x)
        return self.head(x[:, 0])


def test_the_task_of_timm_runs(monkeypatch):
    if importlib.util.find_spec("timm") is None:
        models = types.ModuleType("timm.models")
        models.__dict__["VisionTransformer"] = VisionTransformer
        monkeypatch.setitem(sys.modules, "timm", types.ModuleType("timm"))
        monkeypatch.setitem(sys.modules, "timm.models", models)
    positions = [block.attn._grid.compute() for block in run("timm")["vit"].blocks]
    assert all(p[0].isnan().all() for p in positions)
    assert [p.tolist()[1:3] for p in positions] == [[[0, 0], [0, 1]]] * 2


def in_a_process(title, **environment):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + CODE[title]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_task_of_fsdp2_runs():
    if not hasattr(torch.cpu.Stream(), "record_event"):  # as up to torch 2.6
        pytest.skip("FSDP2 of this torch needs a GPU")
    port, rank = str(free_port()), {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    in_a_process("Sharding with FSDP2", MASTER_ADDR="localhost", MASTER_PORT=port, **rank)


@pytest.mark.slow
def test_the_task_of_keras_runs():
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    in_a_process("Keras", KERAS_BACKEND="torch")


@pytest.mark.parametrize("backend", ["numpy", "jax.numpy"])
def test_the_task_of_jax_is_rope_without_torch(monkeypatch, backend):
    assert "torch" not in CODE["JAX"]
    if backend == "numpy":
        monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
        monkeypatch.setitem(sys.modules, "jax.numpy", numpy)
    else:
        pytest.importorskip("jax", reason="jax is not installed")
    rotate = run("JAX", imports="")["rotate"]
    x = torch.randn(9, 16)
    turned = torch.tensor(numpy.array(rotate(x.numpy(), numpy.arange(9)))).float()
    want, _ = posenc.RoPE(16, interleaved=False)(x[None, None], x[None, None], range(9))
    torch.testing.assert_close(turned, want[0, 0], rtol=0, atol=1e-5)
