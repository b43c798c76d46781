"""What docs/judge.md shows runs: three trainers write a table, and it is judged."""

import contextlib
import csv
import importlib.util
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import posenc
from posenc.compare.judging.near_far import standings
from posenc.compare.page.numbers import csv_text
from posenc.compare.results import TrialResult
from tests.compare.judging.test_summary import TRIAL, seeds, study
from tests.hf_models import COMMON

transformers = pytest.importorskip("transformers")
DOCUMENT = (Path(__file__).parents[3] / "docs/judge.md").read_text(encoding="utf-8")


def block(info: str) -> str:
    (code,) = re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert code.count("\n") <= 21
    return code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which write_losses.py lies."""
    (tmp_path / "write_losses.py").write_text(block("python file=write_losses.py"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "write_losses", raising=False)
    yield tmp_path
    sys.modules.pop("write_losses", None)


def changed(code: str, **words: str) -> str:
    """The code with other words: an encoding, a seed, shorter lengths."""
    for before, after in words.items():
        pattern = {"encoding": '"rope"', "lengths": "(1024, 4096)", "seed": "0, (block"}[before]
        assert pattern in code
        code = code.replace(pattern, after)
    return code


def judged(folder: Path):
    rows = [*csv.DictReader((folder / "losses.csv").read_text("utf-8").splitlines())]
    assert list(rows[0]) == ["encoding", "seed", "length", "position", "loss"]
    assert [(row["length"], row["position"]) for row in rows[:3]] == [
        ("8", ""),
        ("32", ""),
        ("32", "24"),
    ]
    return posenc.compare.judge(folder / "losses.csv")


def check(folder: Path) -> None:
    """Two encodings of two seeds were written, and have a verdict near and far."""
    study = judged(folder)
    assert [(t.encoding, t.seed) for t in study.trials] == [
        ("rope", 0),
        ("rope", 1),
        ("nope", 0),
        ("nope", 1),
    ]
    assert "on the last 8 of 32" in study.recommendation and not study.failed


class NanoGPT(nn.Module):
    """A model with the signature of nanoGPT's, of one layer."""

    def __init__(self, encoding: str, block_size: int) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(block_size=block_size)
        self.embed, self.head = nn.Embedding(19, 16), nn.Linear(16, 19)
        self.attention = posenc.Attention(16, 2, encoding=encoding)

    def forward(self, idx, targets=None):
        length = idx.shape[1]
        assert length <= self.config.block_size, "longer than block_size"
        x = self.embed(idx)
        x = x + self.attention(x, torch.arange(length), mask=posenc.masks.causal)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_nanogpt(folder):
    tokens = np.random.default_rng(0).integers(0, 19, 2000).astype(np.uint16)
    (folder / "data").mkdir()
    tokens.tofile(folder / "data/val.bin")
    for encoding in ("rope", "nope"):
        for seed in (0, 1):
            torch.manual_seed(seed)
            scope = {
                **{"os": os, "np": np, "torch": torch, "data_dir": "data", "device": "cpu"},
                **{"master_process": True, "ddp": False, "block_size": 8},
                **{"ctx": contextlib.nullcontext(), "model": NanoGPT(encoding, 8)},
            }
            code = changed(
                block("python trainer=nanogpt"), encoding=f'"{encoding}"', seed=f"{seed}, (block"
            )
            exec(compile(code, "docs/judge.md", "exec"), scope)
    check(folder)


def llama(seed: int):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))


class Windows(torch.utils.data.Dataset):
    """Sixteen windows of nine tokens."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(index, index + 9)
        return {"input_ids": ids, "labels": ids}


HELD_OUT = torch.arange(2000) % 257


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="transformers' Trainer needs accelerate, which is not installed",
)
def test_trainer_of_transformers(folder):
    for encoding in ("rope", "nope"):
        for seed in (0, 1):
            args = transformers.TrainingArguments(
                str(folder / "out"),
                max_steps=1,
                seed=seed,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
            )
            scope = {
                "model": llama(seed),
                "args": args,
                "train_dataset": Windows(),
                "held_out": HELD_OUT,
            }
            code = changed(
                block("python trainer=transformers"), encoding=f'"{encoding}"', lengths="(8, 32)"
            )
            exec(compile(code, "docs/judge.md", "exec"), scope)
    check(folder)


def test_the_callback_of_transformers_without_its_trainer(folder):
    code = block("python trainer=transformers").partition("trainer = Trainer")[0]
    for encoding in ("rope", "nope"):
        for seed in (0, 1):
            scope = {"held_out": HELD_OUT}
            exec(changed(code, encoding=f'"{encoding}"', lengths="(8, 32)"), scope)
            args = types.SimpleNamespace(seed=seed)
            state = types.SimpleNamespace(is_world_process_zero=True)
            scope["WriteLosses"]().on_train_end(args, state, None, model=llama(seed))
    check(folder)


def test_the_code_for_lightning_is_python():
    compile(block("python trainer=lightning"), "docs/judge.md", "exec")


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)
@pytest.mark.filterwarnings("ignore")
def test_lightning(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    for encoding in ("rope", "nope"):
        for seed in (0, 1):
            scope = {
                **{
                    "module": Module(llama(seed)),
                    "held_out": HELD_OUT,
                    "seed": seed,
                    "max_steps": 1,
                },
                "train_dataloaders": torch.utils.data.DataLoader(Windows(), 4),
            }
            code = changed(
                block("python trainer=lightning"), encoding=f'"{encoding}"', lengths="(8, 32)"
            )
            exec(compile(code, "docs/judge.md", "exec"), scope)
    check(folder)


def test_the_table_that_it_shows_is_judged(tmp_path):
    path = tmp_path / "losses.csv"
    path.write_text(block("csv"), encoding="utf-8")
    study = posenc.compare.judge(path)
    assert (
        study.recommendation.startswith("Take alibi")
        and "on the last 1,024 of 4,096" in study.recommendation
    )


def test_the_example_in_python_runs(capsys):
    code = block("python")
    exec(compile(code, "docs/judge.md", "exec"), {})
    shown = code.rpartition("# ")[2].removesuffix(" ...\n")
    assert capsys.readouterr().out.startswith(shown)


def test_the_rows_of_a_run_are_judged_as_compare_judges_them(tmp_path, monkeypatch):
    run = study(
        *seeds("t5", (2.0, 2.1, 2.2)),
        *seeds("rope", (2.1, 3.0, 4.0), readings={"window": (2.1, 2.15, 2.25)}),
        *seeds("alibi", (2.3, None, None)),
        *seeds("nope", (2.5, 2.6, 2.7))[:2],
        TrialResult(replace(TRIAL, encoding="nope", seed=2), reason="loss became nan"),
    )
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/results.csv").write_text(csv_text(run), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(compile(block("python rows=compare"), "docs/judge.md", "exec"), scope)
    judged = posenc.compare.judge(scope["table"])
    assert [[*map(s.verdict, s.order)] for s in standings(judged)] == [
        [*map(s.verdict, s.order)] for s in standings(run)
    ]
    assert [s.order for s in standings(judged)] == [s.order for s in standings(run)]
    assert standings(judged)[1].order == ("t5", "rope in a window")
    assert judged.recommendation.startswith("Failed trials: nope 1 of 3; not judged. ")
