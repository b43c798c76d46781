"""The table of production models in docs/learn has the numbers of the published configs."""

import json
import re
from pathlib import Path

import pytest

from posenc.runtimes.known import emulate

ROOT = Path(__file__).parents[1]
VENDORS = json.loads((ROOT / "tests/runtimes/known/vendors.json").read_text("utf-8"))
MODELS = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "DeepSeek V3": "deepseek-v3",
    "Qwen2.5 1M": "qwen2.5-1m",
    "Mistral 7B v0.1": "mistral-7b-v0.1",
    "Gemma 3 4B": "gemma-3-4b-text",
    "OLMo 3": "olmo-3-think",
    "gpt-oss 20B": "gpt-oss-20b",
    "Command R7B": "command-r7b",
    "EXAONE 4 32B": "exaone-4-32b",
    "SmolLM3 3B": "smollm3-3b",
}
PAGES = ("production.md", "production.zh-CN.md")
GEMMA = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
"""What Gemma 3's class has where its config says nothing."""

pytestmark = pytest.mark.prose


def rows(page):
    text = (ROOT / "docs/learn" / page).read_text("utf-8")
    table = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)[1:]
    return {row[0]: row[1:] for row in (line.split(" | ") for line in table)}


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_configs(page):
    shown = rows(page)
    assert [*shown] == [*MODELS]
    for model, (windows, others, base, scaling, _) in shown.items():
        config = VENDORS[MODELS[model]]
        window = config.get("sliding_window")
        assert (f"{window:,}" in windows) if window else (windows in ("none", "无")), model
        given = GEMMA if config["model_type"] == "gemma3_text" else config
        assert base == f"{given['rope_theta']:,.0f}", model
        factor = (config.get("rope_scaling") or {}).get("factor")
        numbers = re.findall(r"(?<!Llama )\b\d+\b", scaling)
        assert numbers == ([f"{factor:.0f}"] if factor else []), model
        silent = emulate(config)["transformers-5"].without_rotation
        assert bool(silent) == bool(re.search("no positions|无位置编码", others)), model
        if kinds := config.get("layer_types"):
            count = kinds.count("sliding_attention")
            both = {"production.md": f"{count} of {len(kinds)}"}
            both |= {"production.zh-CN.md": f"{len(kinds)} 层中的 {count} 层"}
            assert windows.startswith(both[page]), model


def test_only_the_layers_without_a_window_are_scaled_where_the_page_says_so():
    for model, (*_, scaling, _) in rows("production.md").items():
        rotations = emulate(VENDORS[MODELS[model]])["transformers-5"].rotations
        plain = "sliding_attention" in rotations
        assert ("in the other layers" in scaling) == plain, model
        if plain:
            windowed, whole = (rotations[kind].inv_freq for kind in sorted(rotations)[::-1])
            assert whole[-1] < windowed[-1], model
