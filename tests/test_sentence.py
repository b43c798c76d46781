"""Sentences in the reader's language, and the catalogue of their translations."""

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from posenc import sentence
from posenc.compare.trial.evaluate import CANNOT
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.report.machine import machine
from posenc.report.page.page import words
from posenc.sentence import (
    catalogue,
    join_names,
    language_of_environment,
    phrase,
    translate_stored_text,
    use_language,
)
from posenc.tasks.known import TASKS

FIGURES = ("by-length", "by-context", "by-position", "training")
STUDIES = {"code", "novel", "ruler", "tasks", "text"}
"""Names of the files of the leaderboard."""
ROOT = Path(__file__).parents[1]


def computed() -> dict[str, set[str]]:
    """Templates by the expression that `phrase` is called with, where no constant says them."""
    tasks = TASKS.values()
    metrics, counts = {t.metric for t in tasks}, {t.counts for t in tasks}
    return {
        "definition.metric": metrics,
        "definition.counts": counts,
        "TASKS[task].metric": metrics,
        "TASKS[task].counts": counts,
        "TASKS[key].metric": metrics,
        "TASKS[trial.task].counts": counts,
        "definition.title": {t.title for t in tasks},
        "case.variant": {c.variant for t in tasks for c in t.cases(t.test_lengths)},
        "objective_of(config).scoring_note": {o.scoring_note for o in OBJECTIVES.values()},
        "loss.verdict": {"best", "tied", "worse"},
        "rows.verdict_of(standing, name)": {"best", "tied", "worse"},
        "f'caption {name}'": {f"caption {name}" for name in FIGURES},
        "f'alternative {name}'": {f"alternative {name}" for name in FIGURES[1:]},
        "target": {*words().values()},
        "word": {*words()},
        "corpus.split": {"by file", "by contiguous stretches"},
        "trial.spec.get('parameters shared by', '')": {"the layers", "no other layer"},
        "template": {*CANNOT},
        "use": {"Short context", "Long context", "Copying and recall"},
        "n": STUDIES,
        "name": STUDIES,
        "text": STUDIES,
        "fact": {
            *machine.describe("cpu", "float32", 1),
            *("text", "split", "model", "training", "seeds", "started", "hash of the code"),
            *("engine", "machines", "partition", "warning", "commit"),
        },
    }


def sources() -> dict[str, str]:
    files = (ROOT / "posenc").rglob("*.py")
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    return {name: text for name, text in texts.items() if "phrase" in text}


def used(files: dict[str, str]) -> Iterator[str]:
    """Every template that the files call `phrase` with.

    Raises: LookupError for an argument of which `computed` does not know the values.
    """
    trees = {name: ast.parse(text) for name, text in files.items()}
    constants = {
        (Path(name).stem, key): value
        for name, tree in trees.items()
        for key, value in assigned(tree.body).items()
    }
    for name, tree in trees.items():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            local = assigned(ast.walk(function))
            for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
                arguments = call.args[:1] if is_phrase(call.func) else []
                if isinstance(call.func, ast.Name) and call.func.id == "map":
                    arguments = call.args[1:] if is_phrase(call.args[0]) else []
                for argument in arguments:
                    yield from templates(argument, Path(name).stem, local, constants)


def is_phrase(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "phrase"


def assigned(body) -> dict[str, list[ast.expr]]:
    """The values of each name that is assigned to there."""
    found: dict[str, list[ast.expr]] = {}
    for node in body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names, values = [target], [node.value]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                names, values = target.elts, node.value.elts
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def templates(node: ast.expr, module: str, local: dict, constants: dict) -> Iterator[str]:
    """The strings that an expression can have as its value."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from templates(one, module, local, constants)
            yield from templates(other, module, local, constants)
        case ast.Tuple(elts=parts):
            for part in parts:
                yield from templates(part, module, local, constants)
        case ast.Subscript(value=whole) if isinstance(whole, ast.Name):
            yield from templates(whole, module, local, constants)
        case ast.Name(id=name) if name in local:
            for value in local[name]:
                if not (isinstance(value, ast.Call) and is_phrase(value.func)):
                    yield from templates(value, module, {**local, name: []}, constants)
        case ast.Name(id=name) if (module, name) in constants:
            for value in constants[module, name]:
                yield from templates(value, module, local, constants)
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in constants:
            for value in constants[owner, name]:
                yield from templates(value, owner, {}, constants)
        case _:
            yield from computed()[ast.unparse(node)]


def wrong(files: dict[str, str], translated: dict[str, str]) -> list[str]:
    """What the catalogue lacks, has for nothing, or fills with other values, one line each."""
    templates, named = set(used(files)), catalogue("en")
    found = [f"not translated: {each}" for each in sorted(templates - translated.keys())]
    found += [f"not used: {each}" for each in sorted(translated.keys() - templates)]
    for name, chinese in translated.items():
        if fields(named.get(name, name)) != fields(chinese):
            found.append(f"other values: {name}")
    return found + [f"not used: {each}" for each in sorted(named.keys() - templates)]


def fields(template: str) -> set[tuple[str | None, str | None]]:
    return {(name, spec) for _, name, spec, _ in string.Formatter().parse(template) if name}


def test_what_is_stored_in_english_is_retold_where_it_is_one_of_the_templates():
    for template in CANNOT:
        english = template.format(limit="1,024", needed="2,048")
        assert translate_stored_text(english, CANNOT) == english
        with use_language("zh"):
            chinese = translate_stored_text(english, CANNOT)
            assert chinese == phrase(template, limit="1,024", needed="2,048") != english
    with use_language("zh"):
        assert translate_stored_text("it stopped", CANNOT) == "it stopped"


def test_the_catalogue_is_complete():
    assert wrong(sources(), catalogue("zh")) == []


PLANTED = "def f(study):\n    said = 'Nothing is {what}.'\n    return phrase({})\n"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("'A new sentence.'", "not translated: A new sentence."),
        ("said, what=1", "not translated: Nothing is {what}."),
        ("'cannot' if study else 'A new word'", "not translated: A new word"),
    ],
)
def test_a_new_sentence_without_translation_is_seen(argument, expected):
    planted = {"posenc/new.py": PLANTED.replace("{}", argument)}
    assert wrong(sources() | planted, catalogue("zh")) == [expected]


def test_a_sentence_that_no_constant_says_is_seen():
    with pytest.raises(LookupError, match=r"study\.name"):
        wrong(sources() | {"posenc/new.py": PLANTED.replace("{}", "study.name")}, catalogue("zh"))


@pytest.mark.parametrize("english", ["{name}: {found}", "caption training", "16 pairs"])
def test_a_missing_translation_is_seen(english):
    left = {key: value for key, value in catalogue("zh").items() if key != english}
    assert wrong(sources(), left) == [f"not translated: {english}"]


def test_a_translation_for_nothing_is_seen():
    assert wrong(sources(), catalogue("zh") | {"Gone.": "没了。"}) == ["not used: Gone."]


@pytest.mark.parametrize("chinese", ["{count:,} 个任务", "{number} 个任务", "几个任务"])
def test_a_translation_with_other_values_is_seen(chinese):
    assert wrong(sources(), catalogue("zh") | {"{count} tasks": chinese}) == [
        "other values: {count} tasks"
    ]


def test_a_phrase_is_filled_in_the_language_that_is_spoken():
    template = "{count} task|{count} tasks"
    assert [phrase(template, number=n, count=n) for n in (0, 1, 2)] == [
        "0 tasks",
        "1 task",
        "2 tasks",
    ]
    with use_language("zh"):
        assert [phrase(template, number=n, count=n) for n in (1, 2)] == ["1 个任务", "2 个任务"]
        assert phrase("{unknown} words", unknown="{a}") == "{a} words"
        assert phrase("a key {of} someone's file") == "a key {of} someone's file"
        assert join_names(["rope", "t5", "nope"]) == "rope、t5 和 nope"
        with use_language("en"):
            assert join_names(["rope", "t5", "nope"]) == "rope, t5 and nope"
        assert sentence.join_clauses(["甲", "乙"]) == "甲；乙。"
    assert phrase("cannot") == "cannot"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
        ({"LANG": "de_DE.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LC_ALL": "zh", "LC_MESSAGES": "en_US"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en_US:zh"}, "en"),
        ({"LANG": "C", "LC_CTYPE": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_the_usual_language_is_that_of_messages(monkeypatch, environment, expected):
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert language_of_environment() == expected


def test_long_templates_have_names():
    name = "facts of the split"
    values = {"split": "by file", "train_bytes": 2000, "valid_bytes": 1, "test_bytes": 3}
    expected = "by file: 2,000 bytes to train on, 1 to validate, 3 to test"
    assert phrase(name, **values) == expected
