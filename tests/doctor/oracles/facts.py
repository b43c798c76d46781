"""Record what releases of transformers have and compute: make facts PYTHONS="PYTHON ..."

Each interpreter has one release. It says which config classes it has, and answers questions about
each family that posenc knows of transformers 5: the spellings that published configs carry,
on small sizes. posenc/runtimes/known/releases.json then holds, for each release, the classes
that came with it or went, and by which words of a config a family is not as posenc knows it: there
posenc says that it does not know what this release computes. Classes that only wrap a language
model, and those with one rope dict that the simplest emulator describes, become lines of
families.json and transformers5.json. A person reads the diff.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posenc.runtimes import families
from posenc.runtimes.ask import RuntimeAnswer, as_computed, ask
from posenc.runtimes.computed_positions import ComputedPositions
from posenc.runtimes.config_model import Model, model_of
from posenc.runtimes.families import RUNTIME_FILES, all_families, facts_of_runtime
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.known.releases import Release, recorded_releases, version_numbers
from posenc.runtimes.runtime_facts import Transformers5Facts

HERE = Path(__file__).parent
FAMILIES = Path(families.__file__).with_name("families.json")
KNOWN = FAMILIES.parent / "known"
RELEASES = KNOWN / "releases.json"
LENGTH = 256
SIZES = {
    "hidden_size": 192,
    "d_model": 192,
    "num_attention_heads": 6,
    "n_heads": 6,
    "num_heads": 6,
    "num_key_value_heads": 6,
    "num_hidden_layers": 7,
    "n_layers": 7,
    "vocab_size": 64,
    "pad_token_id": 0,
    "max_position_embeddings": LENGTH,
}
"""Sizes that no class has by default, of the keys that a class has."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = {"rope_theta": 54321.0}
SECTIONS = [4, 6, 6]
"""M-RoPE's pairs of each axis, for the 16 pairs of a head of SIZES."""
QUESTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a base": BASE,
    "a base in rope_parameters": {"rope_parameters": {"rope_type": "default", **BASE}},
    "yarn": {**BASE, "rope_scaling": YARN},
    "yarn in rope_parameters": {"rope_parameters": {**YARN, **BASE}},
    "linear": {**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {**BASE, "rope_scaling": LLAMA3},
    "a share": {**BASE, "partial_rotary_factor": 0.5},
    "a share in rope_parameters": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **BASE}
    },
    "a number of channels": {**BASE, "rotary_dim": 16},
}
"""What a config says of its rotation -> its keys; nested by kind where the family's dicts are."""
WORDS = {
    "nothing": "all",
    "a base": "rope_theta",
    "a base in rope_parameters": "rope_parameters",
    "yarn": "yarn",
    "yarn in rope_parameters": "yarn",
    "linear": "linear",
    "llama3": "llama3",
    "a share": "partial_rotary_factor",
    "a share in rope_parameters": "rope_parameters",
    "a number of channels": "rotary_dim",
}
"""Question -> the word of a config that has such keys: a key of it, or a type of its dicts."""
NEEDS = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3 + ["mamba"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 3 + ["mamba"], "use_mem_rope": True},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "dbrx": {"attn_config": BASE},
    "diffusion_gemma_text": {
        "num_global_key_value_heads": 6,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "hunyuan_vl_text": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3 + ["conv"]},
    "ministral": {"head_dim": 32},
}
"""What a class wants to be told with other sizes."""


NOT_SEEN = ("phimoe",)
"""Families whose module keeps its frequencies in no buffer in transformers 4, so that no probe sees
them."""
OTHER_HEADS = ("deepseek_v4", "mistral4")
"""Families whose rotated part has a size of its own, to which SIZES do not fit."""


def classes_of(python: str) -> dict[str, Any]:
    """The answer of classes_probe.py, run by an interpreter."""
    command = [python, str(HERE / "classes_probe.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    return json.loads(said.stdout)


def asked_families(release: str, classes: Mapping[str, Any]) -> list[str]:
    """The language models that a release has and that posenc knows of its runtime."""
    found = []
    for name, facts in sorted(all_families().items()):
        has_text = "vocab_size" in classes.get(name, {}).get("keys", ())
        is_tower = "axes" in (facts.get("transformers5") or {})
        is_known = bool(facts.get(RUNTIME_FILES[runtime_of(release)]))
        if is_known and has_text and not is_tower and name not in OTHER_HEADS:
            found.append(name)
    return found


def configs_of(
    name: str, keys: list[str], nested: Mapping[str, Any] | None, required: Iterable[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(question, config) about a family whose class has these keys. nested: the rope dicts of the
    class by kind of layer; None for one dict. required: keys of a rope dict without which its
    module stops."""
    sizes = {key: value for key, value in SIZES.items() if key in keys}
    facts = Transformers5Facts.of(all_families()[name].get("transformers5"))
    if facts.sections:  # as many pairs of each head must rotate
        rotated_part = facts.partial_rotary_factor or 1.0
        sizes["hidden_size"] = int(6 * 2 * sum(facts.sections) / rotated_part)
    plain = {"model_type": name, **sizes, **NEEDS.get(name, {})}
    for question, given in QUESTIONS.items():
        own = dict(given)
        if "mrope_section" in required:
            scaling = own.get("rope_scaling") or {"rope_type": "default"}
            sections = list(facts.sections or SECTIONS)
            own["rope_scaling"] = {**scaling, "mrope_section": sections}
        if nested and "rope_parameters" in own:
            own["rope_parameters"] = dict.fromkeys(nested, own["rope_parameters"])
        yield question, {**plain, **own}


def _nested(name: str) -> Mapping[str, Any] | None:
    """The rope dicts by kind of layer of a family that posenc knows; None for one dict."""
    return Transformers5Facts.of(all_families()[name].get("transformers5")).dicts_by_kind


def _required(name: str, release: str) -> Iterable[str]:
    """The keys of a rope dict without which the module of a family stops in a release, as posenc
    knows them."""
    return all_families()[name][RUNTIME_FILES[runtime_of(release)]].get("required", ())


def runtime_of(release: str) -> str:
    return f"transformers-{4 if release.startswith('4.') else 5}"


def in_outer_class(config: dict[str, Any], classes: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a class around the language model of a config, for a release that builds the
    model only so; the same config where there is no such class."""
    for name, said in sorted(classes.items()):
        if said.get("text") == config["model_type"] and not said["any"]:
            return {"model_type": name, said["text_key"]: config}
    return config


def difference(asked: RuntimeAnswer, known: ComputedPositions, model: Model) -> str:
    """How what is known differs from what a release answered; empty where it does not, or where one
    of them says nothing."""
    answer = as_computed(asked, known, model).with_stop_as_refusal
    known = known.with_stop_as_refusal
    if not (answer.is_known and known.is_known) or "mrope_section" in (known.error or ""):
        return ""  # that sections do not add up, some releases notice in attention only
    if not answer.rotations and not answer.error and model.model_type in NOT_SEEN:
        return ""
    if (answer.error is None) != (known.error is None):
        return f"{'refused' if answer.error else 'computed'}: {answer.error or known.error}"
    for kind, layer in known.rotations.items():
        same = answer.rotations.get(kind, answer.rotations.get("all"))
        if same is None:
            return f"no {kind}"
        if len(same.inv_freq) != len(layer.inv_freq):
            return f"{len(same.inv_freq)} pairs, not {len(layer.inv_freq)}"
        pairs = zip(same.inv_freq, layer.inv_freq, strict=True)
        if not all(abs(a - b) <= 1e-4 * abs(b) for a, b in pairs):
            return "other frequencies"
        if not abs(same.multiplier - layer.multiplier) <= 1e-4 * layer.multiplier:
            return f"multiplier {same.multiplier:g}, not {layer.multiplier:g}"
    mine, own = known.softmax_scale, answer.softmax_scale
    if mine is not None and own is not None and not abs(own - mine) <= 1e-4 * mine:
        return f"softmax scale {own:g}, not {mine:g}"
    if answer.error is None and {*answer.without_rotation} != {*known.without_rotation}:
        return f"layers {answer.without_rotation} do not rotate, not {known.without_rotation}"
    return ""


def differences_in(python: str, release: str, names: list[str], classes: Mapping[str, Any]):
    """family -> question -> how the release differs from what posenc knows of it; and how many
    questions were compared. A class that does not take the sizes of SIZES is left out, and said."""
    rows = [
        (name, question, config)
        for name in names
        for question, config in configs_of(
            name, classes[name]["keys"], _nested(name), _required(name, release)
        )
    ]
    row = runtime_of(release)
    questions = [(config, [LENGTH]) for _, _, config in rows]
    answers = ask(questions, python, "transformers", seconds=7200)
    parts_of_others = {
        name
        for (name, question, _), asked in zip(rows, answers, strict=True)
        if question == "nothing" and (asked.refusal or asked.why_unmeasured)
    }
    rows = [
        (name, question, in_outer_class(config, classes) if name in parts_of_others else config)
        for name, question, config in rows
    ]
    second_questions = [(config, [LENGTH]) for name, _, config in rows if name in parts_of_others]
    second_answers = iter(ask(second_questions, python, "transformers", seconds=7200))
    answers = [
        next(second_answers) if name in parts_of_others else answer
        for (name, _, _), answer in zip(rows, answers, strict=True)
    ]
    minor = ".".join(release.split(".")[:2])
    wrong: dict[str, dict[str, str]] = {}
    compared = 0
    unfit = {
        name
        for (name, question, _), asked in zip(rows, answers, strict=True)
        if question == "nothing" and asked.refusal
    }
    print(f"{release}: wants other sizes: {', '.join(sorted(unfit)) or 'no class'}")
    for (name, question, config), asked in zip(rows, answers, strict=True):
        if name in unfit:
            continue
        known = RUNTIMES[row](config, LENGTH, minor)
        compared += known.is_known and not asked.why_unmeasured
        if why := difference(asked, known, model_of(config)):
            wrong.setdefault(name, {})[question] = why
    return wrong, compared


def flat_families_of(python: str, classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts of language models with one rope dict that it lacks, of which the
    simplest emulator says what the release answers to every question."""
    lines = {}
    for name, said in sorted(classes.items()):
        rope, sizes = said.get("rope") or {}, said.get("sizes", {})
        has_base = "rope_theta" in rope and "num_attention_heads" in sizes
        if name in all_families() or not has_base or "vocab_size" not in said["keys"]:
            continue
        if len(said["kinds"]) > 1:  # some may not rotate, which no answer shows
            print(f"  {name} has several kinds of layers, read its source: {said['kinds']}")
            continue
        for line in _candidates(said):
            questions = configs_of(name, said["keys"], None)
            configs = [config for _, config in questions]
            answers = ask([(config, [LENGTH]) for config in configs], python, seconds=600)
            pairings = {answer.interleaved for answer in answers} - {None}
            if len(pairings) != 1:
                print(f"  {name}: its pairs are not seen: {answers[0]}"[:300])
                break
            line["interleaved"] = pairings.pop()
            all_families()[name] = line
            why = [
                difference(answer, RUNTIMES["transformers-5"](config, LENGTH), model_of(config))
                for config, answer in zip(configs, answers, strict=True)
            ]
            measured = sum(not answer.why_unmeasured for answer in answers)
            if not any(why) and 2 * measured > len(answers):
                lines[name] = line
                break
            del all_families()[name]
            print(f"  {name} is not as {line['transformers5']}: {[text for text in why if text]}")
    return lines


def _candidates(said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lines for a class, the simplest first: whose module reads no share, and reads one."""
    rope, sizes = said["rope"], said["sizes"]
    facts: dict[str, Any] = {"read": said["read"], "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        facts["own_dicts"] = {"all": rope}
    share = rope.get("partial_rotary_factor", 1.0)
    shares: list[dict[str, Any]] = [{}] if share == 1.0 else []
    shares.append({"partial_rotary_factor": share})
    divided = {key: size for key, size in sizes.items() if key != "head_dim"}
    for defaults in (sizes, divided):  # a head_dim may be what the class divides
        for own in shares:
            line = {"architecture": said["architecture"], "defaults": defaults}
            if said["names"]:
                line["names"] = said["names"]
            yield {key: value for key, value in line.items() if value} | {
                "transformers5": {**facts, **own}
            }


def wrappers_of(python: str, classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts that posenc lacks of classes that only wrap a language model which it
    knows, if the release answers as that model does. Servers have code of their own for them, which
    nobody has read."""
    lines = {}
    for name, said in sorted(classes.items()):
        text = said.get("text")
        facts = all_families().get(text or "", {})
        known = "text" not in facts and facts.get("transformers5")
        if name in all_families() or not known or said["text_key"] != "text_config":
            continue
        unread: dict[str, Any] = {cell: {} for cell in ("vllm", "sglang", "mlx_lm", "llama_cpp")}
        line = {"text": text, "read": said["read"]} | ({"any": True} if said["any"] else {})
        lines[name] = line | unread
    all_families().update(lines)
    configs = {name: _wrapped(name, line["text"], classes) for name, line in lines.items()}
    answers = ask([(config, [LENGTH]) for config in configs.values()], python, seconds=3600)
    for (name, config), answer in zip(configs.items(), answers, strict=True):
        known = RUNTIMES["transformers-5"](config, LENGTH)
        why = difference(answer, known, model_of(config))
        if why or answer.why_unmeasured or answer.refusal or not known.is_known:
            said = why or answer.why_unmeasured or answer.refusal or known.error
            print(f"  {name} is not as its language model, or not seen: {said}")
            del lines[name], all_families()[name]
    return lines


def _wrapped(name: str, text: str, classes: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a class that wraps a language model: with a base of its own in it."""
    keys = classes[text]["keys"]
    sizes = {key: value for key, value in SIZES.items() if key in keys and key != "vocab_size"}
    if sections := (all_families()[text].get("transformers5") or {}).get("sections"):
        sizes["hidden_size"] = 6 * 2 * sum(sections)  # each head has as many pairs
    inner = {"model_type": text, **sizes, **NEEDS.get(text, {}), **BASE}
    return {"model_type": name, "text_config": inner}


def write_families(table: Mapping[str, Mapping[str, Any]]) -> None:
    """Write families.json and each runtime's file of facts, one line a family.

    table: as `all_families` returns it.
    """
    keys = RUNTIME_FILES.values()
    common = {
        name: {key: value for key, value in line.items() if key not in keys}
        for name, line in table.items()
    }
    FAMILIES.write_text("{\n" + _one_a_line(common, "") + "\n}\n", encoding="utf-8")
    for runtime, key in RUNTIME_FILES.items():
        lines = {name: line[key] for name, line in table.items() if key in line}
        changed = {
            "has no": sorted(name for name, line in lines.items() if line is None),
            "not read": sorted(name for name, line in lines.items() if line == {}),
            "families": {name: line for name, line in lines.items() if line},
        }
        parts = [
            f" {json.dumps(part)}: {_as_text(value)}"
            for part, value in {**facts_of_runtime(runtime), **changed}.items()
        ]
        text = "{\n" + ",\n".join(parts) + "\n}\n"
        (KNOWN / f"{key}.json").write_text(text, encoding="utf-8")


def _as_text(value: Any) -> str:
    """JSON of a part of a runtime's file: a table has one line an entry."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + _one_a_line(value, "  ") + "\n }"


def _one_a_line(table: Mapping[str, Any], indent: str) -> str:
    return ",\n".join(f"{indent}{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())


def main(pythons: list[str]) -> int:
    """Record the releases of these interpreters. Those recorded before and not asked now stay."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {}
    for python in pythons:
        answer = classes_of(python)
        asked[answer["version"]] = (python, answer["classes"])
    newest = max(asked, key=version_numbers)
    if runtime_of(newest) == "transformers-5":
        python, classes = asked[newest]
        add_new_families(newest, python, classes)
    releases = {each.version: each for each in recorded_releases(4) + recorded_releases(5)}
    for version in sorted(asked, key=version_numbers):
        python, classes = asked[version]
        releases[version] = recorded(version, python, classes)
    write_releases(releases.values())
    return 0


def add_new_families(release: str, python: str, classes: Mapping[str, Any]) -> None:
    """Add to the facts what a release has and posenc does not know: flat families and wrappers."""
    lines = {**flat_families_of(python, classes), **wrappers_of(python, classes)}
    older = [each for each in recorded_releases(5) if each.version != release]
    for name in lines:  # what came with this release is not in those before
        if "transformers5" in lines[name] and older and name not in older[-1].model_types:
            lines[name]["transformers5"]["since"] = ".".join(release.split(".")[:2])
    print(f"new families: {', '.join(lines)}")
    write_families({**all_families(), **lines})


def recorded(release: str, python: str, classes: Mapping[str, Any]) -> Release:
    """The record of a release: its classes, and where it answers otherwise than posenc knows."""
    names = asked_families(release, classes)
    wrong, compared = differences_in(python, release, names, classes)
    count = sum(map(len, wrong.values()))
    print(f"{release}: {compared} answers compared, {count} differ, of {len(wrong)} families")
    for name, questions in wrong.items():
        print(f"  {name}: {questions}")
    unread = {
        name: sorted({WORDS[question] for question in why}) for name, why in sorted(wrong.items())
    }
    return Release(release, frozenset(classes), unread)


def write_releases(releases: Iterable[Release]) -> None:
    """Write releases.json: of each release what came and went after the one before it, among those
    of transformers 4 or of 5."""
    table: dict[str, Any] = {}
    before: dict[str, frozenset[str]] = {}
    for release in sorted(releases, key=lambda each: version_numbers(each.version)):
        older = before.get(runtime_of(release.version), frozenset())
        table[release.version] = {
            "came": sorted(release.model_types - older),
            "went": sorted(older - release.model_types),
            "unread": release.unread,
        }
        before[runtime_of(release.version)] = release.model_types
    RELEASES.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
