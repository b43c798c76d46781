"""Read, name and build the encodings of a comparison, hash their code, and check them: whole
patterns of layers, no twins, and the contract that a comparison of losses requires of a user's
class."""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from posenc.command_line.errors import one_line
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.task_of_trial import (
    lengths_of_tests,
    objective_of_model,
    shape_length,
)
from posenc.compare.trial.train import encoding_shape
from posenc.encodings import (
    Compose,
    ModelShape,
    PerLayer,
    PositionEncoding,
    Within,
    classes_and_arguments,
    create,
    entry,
    hash_of_posenc_code,
    hash_of_user_code,
    line_in_user_code,
    names,
    parse,
    with_importable_classes,
    with_relative_paths,
)
from posenc.testing import CHECKS, maker, verdicts
from posenc.testing.contract import VOIDING_FAILURES, in_both_modes
from posenc.testing.harness import (
    SHAPE,
    Make,
    build_layer,
    differs,
    possible_length,
    random_embeddings,
    successive_positions,
)


@dataclass(frozen=True)
class ComparedEncoding:
    """An encoding that is compared, as the user named it.

    text: argument for `posenc.create` in any process started in the same folder.
    label: name shown to the user.
    user_code_hash: hash of files outside posenc; "" if there are none.
    posenc_code_hash: hash of posenc's own files.
    """

    text: str
    label: str
    user_code_hash: str
    posenc_code_hash: str = ""


def read_encodings(texts: Sequence[str]) -> tuple[ComparedEncoding, ...]:
    """Return the encodings that the texts name, in the order given. Files are imported; nothing is
    built.

    Raises: ValueError for a text that names no encoding, for two encodings of one label, and for
    an encoding that is named twice, with one label or with two.
    """
    encodings = tuple(map(read_encoding, texts))
    for i, later in enumerate(encodings):
        for earlier in encodings[:i]:
            if later == earlier:
                raise ValueError(f"{later.label!r} is named twice: leave one out.")
            if later.label == earlier.label:
                raise ValueError(
                    f"{later.label!r} names two encodings, {earlier.text} and {later.text}: give "
                    f"one of them another label, as in {later.label}-2={later.text}."
                )
            if later.text == earlier.text:
                raise ValueError(
                    f"{earlier.label!r} and {later.label!r} are the same encoding, {later.text}: "
                    "leave one out."
                )
    return encodings


def read_encoding(text: str) -> ComparedEncoding:
    """Return the encoding that a text names, such as `rope`, `yarn:factor=8` or
    `mine=./my.py:Mine`.

    Raises: ValueError for a text that names no encoding, or whose label is the name of another.
    """
    spec = parse(text)
    code_hash = hash_of_user_code(text)
    text_anywhere = str(with_importable_classes(spec))
    tidied = str(with_relative_paths(spec))
    if spec.label in names() and spec.label != tidied:
        raise ValueError(
            f"{spec.label!r} is the name of an encoding, and {tidied} is another one: use another "
            f"label, as in my-{spec.label}={tidied}."
        )
    return ComparedEncoding(
        text_anywhere, spec.label or tidied, code_hash, hash_of_posenc_code(text)
    )


def build_encoding(text: str, shape: ModelShape) -> PositionEncoding:
    """Build an encoding of a comparison, as `posenc.create`.

    Raises: ValueError for an error in the user's own code, with the class and the line.
    """
    try:
        return create(text, shape)
    except Exception as error:  # a user's constructor may raise anything
        if code_line := line_in_user_code(error):
            raise ValueError(
                f"{text} cannot be built, at {code_line}: {one_line(error)}"
            ) from error
        raise


def check_in_model(trial: TrialConfig, compared: Sequence[ComparedEncoding]) -> None:
    """Raise ValueError for an encoding by layer whose pattern is longer than this trial's model,
    and for two of posenc's encodings that do the same in every layer of it."""
    encodings = [
        build_encoding(compared_encoding.text, encoding_shape(trial))
        for compared_encoding in compared
    ]
    pairs = list(zip(compared, encodings, strict=True))
    for compared_encoding, encoding in pairs:
        if isinstance(encoding, PerLayer):
            try:
                encoding.check_layers(compared_encoding.label, trial.layers)
            except ValueError as error:
                raise ValueError(f"{error} Here --layers {encoding.period} would do.") from None
    pairs_of_posenc = [
        (compared_encoding, encoding)
        for compared_encoding, encoding in pairs
        if not compared_encoding.user_code_hash
    ]
    for (first, a), (second, b) in itertools.combinations(pairs_of_posenc, 2):
        if are_twins(a, b, trial.layers):
            raise ValueError(
                f"{first.label!r} and {second.label!r} are the same encoding in this model of "
                f"{trial.layers} layers: leave one out."
            )


def are_twins(a: PositionEncoding, b: PositionEncoding, num_layers: int) -> bool:
    """Return True if two encodings of posenc are known to do the same in every layer.

    Compares classes and arguments, not results: a scaling by 1 and no scaling are no twins.
    """
    if type(a) is type(b) is not PerLayer and classes_and_arguments(a) == classes_and_arguments(b):
        return True
    # Both patterns begin again together after this many layers.
    common_period = math.lcm(*(e.period if isinstance(e, PerLayer) else 1 for e in (a, b)))
    layers = range(min(num_layers, common_period))
    return _describe_layers(a, layers) == _describe_layers(b, layers)


def _describe_layers(encoding: PositionEncoding, layers: Sequence[int]) -> list[Any]:
    """Return a description of each layer: for every part that acts in it, the first layer with the
    same object, and its class and arguments. Equal descriptions do the same."""
    first_layer_by_id: dict[int, int] = {}  # by the id of a part
    layer_descriptions = []
    for index in layers:
        acting_parts = _parts_in_layer(encoding, index)
        part_descriptions = [
            (first_layer_by_id.setdefault(id(e), index), _class_and_arguments(e))
            for e in acting_parts
        ]
        layer_descriptions.append(
            sorted(part_descriptions, key=repr)
            if _order_is_irrelevant(acting_parts)
            else part_descriptions
        )
    return layer_descriptions


def _class_and_arguments(encoding: PositionEncoding) -> Any:
    """Return the class and arguments of an encoding, to compare; of one within a mask, which has no
    comparable ones, the id of the object."""
    return id(encoding) if isinstance(encoding, Within) else classes_and_arguments(encoding)


def _parts_in_layer(encoding: PositionEncoding, index: int) -> list[PositionEncoding]:
    """Return the parts that act in a layer; embeddings are encoded once, in layer 0."""
    in_layer = encoding.acting_encoding(index) if isinstance(encoding, PerLayer) else encoding
    parts = in_layer.members if isinstance(in_layer, Compose) else (in_layer,)
    acting = [e for e in parts if index == 0 or e.claims.places != (1,)]
    return [e for e in acting if type(e) is not PositionEncoding]  # the base class does nothing


def _order_is_irrelevant(parts: Sequence[PositionEncoding]) -> bool:
    """Return True if the order of the parts changes nothing: they act at different places, or add
    to the same scores."""
    places = [place for e in parts for place in e.claims.places if place != 3]  # 3: the scores
    return len(places) == len(set(places)) and all(e.claims.additive for e in parts)


_REQUIRED_CHECKS = {name: CHECKS[name] for name in VOIDING_FAILURES}


@contextlib.contextmanager
def exits_as_errors() -> Iterator[None]:
    """In the block under `with`, raise ValueError with the line where an encoding ends the program
    (sys.exit) or interrupts it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if code_line := line_in_user_code(error):
            raise ValueError(
                f"{code_line}: {type(error).__name__}, and nothing was trained."
            ) from error
        raise


def check_contracts(
    compared: Sequence[ComparedEncoding], allowed: bool, trials: Sequence[TrialConfig] = ()
) -> dict[str, str]:
    """Check that the user's encodings keep the contract. Return why results of those that break it
    would mean nothing: a dict from the encoding's text to the reason.

    posenc's own encodings are skipped, since the test suite checks them.

    allowed: with --unchecked, return the reasons instead of raising.
    trials: one of each task, at whose shortest and longest length some checks are repeated.
    Raises: ValueError at the first such encoding, unless `allowed`.
    """
    reasons = {}
    causal_trials = [t for t in trials if all(objective_of_model(t).causal_stacks)]
    lengths = set()
    for trial in causal_trials:
        test_lengths = lengths_of_tests(trial)
        for length in (test_lengths[0], max(test_lengths)):
            lengths.add((shape_length(trial), length))
    check_lengths = in_both_modes(partial(_check_outputs_at_lengths, sorted(lengths)))
    checks = _REQUIRED_CHECKS | {"lengths_of_the_study": check_lengths}
    for compared_encoding in compared:
        with contextlib.redirect_stdout(sys.stderr):  # its prints are no output of the command
            why = (
                _contract_failure(compared_encoding, checks)
                if compared_encoding.user_code_hash
                else None
            )
        if why is None:
            continue
        if not allowed:
            raise ValueError(
                f"{compared_encoding.label}: {why}. Its losses would be meaningless. "
                "--unchecked compares it anyway, with a note in the report."
            )
        reasons[compared_encoding.text] = why
    return reasons


def _check_outputs_at_lengths(lengths: Sequence[tuple[int, int]], make: Make) -> None:
    """Check that outputs are finite, do not depend on later tokens, and are the same when later
    tokens are missing.

    lengths: the training length that the encoding is built for, and the tokens of a sequence.
    Raises: AssertionError, as the checks of posenc.testing do.
    """
    for train_length, length in lengths:
        layer = build_layer(make, replace(SHAPE, train_length=train_length))
        positions = successive_positions(layer.encoding, possible_length(layer.encoding, length))
        states = random_embeddings(len(positions), batch=2)
        prefix_length = len(positions) // 2 + 1  # two sequences that differ after it only
        states[1, :prefix_length] = states[0, :prefix_length]
        with torch.no_grad():
            outputs = layer(states, positions, length=len(positions))
            outputs_of_prefix = layer(
                states[:, :prefix_length], positions[:prefix_length], length=len(positions)
            )
        where_in_words = f"in sequences of {length:,} tokens"
        is_finite = outputs.isfinite().all() and outputs_of_prefix.isfinite().all()
        assert is_finite, f"{VOIDING_FAILURES['outputs_are_finite']} {where_in_words}"
        assert not differs(*outputs[:, :prefix_length]), (
            f"{VOIDING_FAILURES['the_future_is_invisible']} {where_in_words}"
        )
        assert not differs(outputs_of_prefix, outputs[:, :prefix_length]), (
            f"{VOIDING_FAILURES['decoding_matches_prefill']} {where_in_words}"
        )


def _contract_failure(
    compared_encoding: ComparedEncoding, checks: dict[str, Callable[[Make], None]]
) -> str | None:
    """Return why results of a user's encoding would mean nothing: the first check that one of its
    parts fails; None if all pass."""
    for part in dict.fromkeys(parse(compared_encoding.text).parts):
        if not part.attribute and not entry(part.name_or_module).origin:
            continue  # posenc's own
        try:
            create(str(part), SHAPE)
        except (Exception, SystemExit) as error:  # a user's constructor may raise anything
            reason = " ".join(str(error).split())[:300].rstrip(".")
            return (
                f"it could not be checked, because it cannot be built for {SHAPE.num_heads} query "
                f"heads and {SHAPE.num_kv_heads} key/value heads of {SHAPE.head_dim}: {reason}"
            )
        for verdict in verdicts(maker(str(part)), checks):
            why = (verdict.failure or "").rstrip(".")
            if verdict.raised:
                return f"{why} (in the check {verdict.check})"
            if why:
                return (
                    f"{VOIDING_FAILURES[verdict.check]} ({why})"
                    if verdict.check in VOIDING_FAILURES
                    else why
                )
    return None
