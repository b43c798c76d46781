"""What the runtimes' own code gave, brought into the words of `ComputedPositions`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"
NAMES = {
    "transformers-4.57.3": "transformers-4",
    "transformers-5.23.0": "transformers-5",
    "vllm-0.33.0": "vllm",
    "sglang-0.5.23": "sglang",
    "mlx-lm-0.32.2": "mlx-lm",
    "llama.cpp-0c1e57098": "llama.cpp",
}
TRIED = (1024, 4096, 8192, 16384)
"""The lengths that vLLM was asked to admit."""


@dataclass(frozen=True)
class Row:
    """One recorded rotation: of which layers, at which length (None: at any)."""

    layers: str | int
    length: int | None
    inv_freq: list[float]
    multiplier: float

    def kinds(self, names: list[str], layer_types: list[str]) -> list[str]:
        """Which kinds of ours it speaks about."""
        if isinstance(self.layers, int):
            return names if len(names) == 1 else [layer_types[self.layers]]
        if "sliding" in self.layers or "local" in self.layers:
            return [name for name in names if "sliding" in name]
        if len(names) > 1 and self.layers != "all":
            return [name for name in names if "full" in name]
        return names


@dataclass(frozen=True)
class Cell:
    """One runtime's answer to one config."""

    case: str
    runtime: str
    config: dict[str, Any]
    recorded: dict[str, Any]

    @property
    def error(self) -> str | None:
        return self.recorded.get("error")

    @property
    def switch(self) -> str | None:
        text = self.recorded.get("switch")
        if text is None:
            return None
        words = {"static": "static", "current length": "length", "batch": "batch"}
        return next((short for word, short in words.items() if word in text), "start")

    @property
    def scales(self) -> list[float]:
        given = self.recorded.get("softmax_scale", {})
        inside = [*self.recorded.get("rotary", {}).values(), *self.recorded.get("layers", [])]
        return [*given.values(), *(r["softmax_scale"] for r in inside if "softmax_scale" in r)]

    @property
    def rows(self) -> Iterator[Row]:
        for layer in self.recorded.get("layers", []):
            for at, probe in layer["probe"].items():
                yield Row(layer["layer"], _length(at), probe["inv_freq"], probe["multiplier"])
        for name, value in self.recorded.get("rotary", {}).items():
            if "inv_freq" in value:
                layers, _, at = name.partition("@")
                if layers.startswith(("n_ctx", "any n_ctx")):
                    layers, at = "all", name
                yield Row(layers, _length(at), value["inv_freq"], value["multiplier"])
                continue
            for at, v in value.items():
                if at not in ("back_to_64", "len_max"):  # after other lengths, not of a length
                    yield Row(name, _length(at), v["inv_freq"], v["multiplier"])


def _length(text: str) -> int | None:
    digits = "".join(c for c in text if c.isdigit())
    return int(digits) if digits else None


def cells() -> list[Cell]:
    """All recorded answers, without those whose tiny config lacked a tokenizer."""
    found = []
    for path in sorted(FOLDER.glob("[0-9]*.json")):
        case = json.loads(path.read_text("utf-8"))
        for name, recorded in case["runtimes"].items():
            if "tokenizer" not in recorded.get("error", ""):
                found.append(Cell(path.stem, NAMES[name], case["config"], recorded))
    return found


def config(name: str) -> dict[str, Any]:
    """The config of the case whose file name starts so."""
    (path,) = FOLDER.glob(f"{name}*.json")
    return json.loads(path.read_text("utf-8"))["config"]
