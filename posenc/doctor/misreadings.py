"""What each runtime misreads of a file: the file, what it means, and what each computes from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from posenc.runtimes.ask import RuntimeAnswer, as_computed, as_loaded
from posenc.runtimes.computed_positions import (
    ComputedPositions,
    Known,
    NotReadError,
    RefusedError,
)
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, BadConfigError, Model, model_of
from posenc.runtimes.disagreement import Aspect, Tolerance, differences
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.files.source import Source
from posenc.runtimes.known import RELEASES, RUNTIMES, emulate
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from posenc.runtimes.known.registry import unrecorded_version
from posenc.runtimes.known.releases import is_recorded
from posenc.runtimes.known.vendor_files import emulate_vendor_file
from posenc.runtimes.meaning import Meaning, UnknownFamilyError, meaning_of, require_known_family
from posenc.runtimes.position_record import PositionRecord, record_of, record_of_meaning

ALL_RUNTIMES = tuple(RUNTIMES)
TOLERANCE = Tolerance(of_frequencies=1e-5, of_multipliers=5e-4)
"""Smaller differences of frequencies are float32 rounding, and those of temperatures change no
measured loss."""


def differing_aspects(computed: ComputedPositions, meant: ComputedPositions) -> frozenset[Aspect]:
    """Return the aspects in which a runtime's result differs from the one meant; empty if none.

    Both must be results, not refusals. A result without a softmax scale differs in "scale".
    """
    return frozenset(difference.aspect for difference in differences(computed, meant, TOLERANCE))


def misread_aspects(
    computed: ComputedPositions, meant: ComputedPositions | None
) -> frozenset[Aspect]:
    """Return the aspects in which a runtime's result differs from the meaning: "error" or
    "arguments" alone for a refusal, none where posenc does not know the runtime or the meaning.

    meant: None where the meaning is unclear.
    """
    if not computed.is_known:
        return frozenset()
    if computed.error is not None:
        return frozenset({"error" if _is_about_positions(computed.error) else "arguments"})
    if meant is None:
        return frozenset()
    return differing_aspects(computed, meant)


def _is_about_positions(error: str) -> bool:
    """Return False for a missing key of a config that has nothing to do with positions: mlx-lm
    stops for any missing key of its dataclass."""
    if "positional argument" not in error:
        return True
    return any(word in error for word in ("rope", "rotary", "max_position"))


@dataclass(frozen=True)
class Case:
    """A file that the rules judge, with the options of the user.

    named_runtimes: keys of RUNTIMES that the user named; all by default. length: tokens to judge
    at, None for the longest meant. served: the config as a server sees it after overrides, None for
    the file's own. versions: runtime -> the version that the user named. own_answers: runtime ->
    what it answered itself, where it was asked.
    """

    source: Source
    named_runtimes: tuple[str, ...] = ALL_RUNTIMES
    length: int | None = None
    served: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    own_answers: Mapping[str, RuntimeAnswer] = field(default_factory=dict)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return the language model's keys, as the file gives them."""
        return self.model.config

    @cached_property
    def model(self) -> Model:
        """Return the sizes and the family that the config describes."""
        return model_of(self.source.config)

    @property
    def metadata(self) -> Metadata | None:
        """Return the settings of a GGUF file; None for a config."""
        return self.source.metadata

    @cached_property
    def _meaning_and_reason(self) -> tuple[Meaning | None, str]:
        """Return the meaning and "", or None and the reason why it is unclear; (None, "") for a
        GGUF file, whose meaning only `record` has."""
        if self.metadata is not None:
            return None, ""
        try:
            return meaning_of(self.source.config, self.length), ""
        except (BadConfigError, UnknownFamilyError):
            raise  # both are ValueErrors, of which nothing can be judged
        except ValueError as error:
            return None, str(error)

    @property
    def meaning(self) -> Meaning | None:
        """Return the meaning; None for GGUF, and if it is unclear, see `why_unclear`.

        Raises: UnknownFamilyError, BadConfigError.
        """
        return self._meaning_and_reason[0]

    @property
    def why_unclear(self) -> str:
        """Return why the meaning is unclear; empty if it is clear, and for a GGUF file."""
        return self._meaning_and_reason[1]

    @cached_property
    def record(self) -> PositionRecord | None:
        """Return what the file means in one record; None where it is unclear, or libllama refuses
        the GGUF file."""
        if self.metadata is not None:
            try:
                return record_of(self.source, self.length)
            except RefusedError:
                return None
        if self.meaning is None:
            return None
        return record_of_meaning(self.meaning, self.source.spelling, self.length)

    @cached_property
    def computed(self) -> dict[str, ComputedPositions]:
        """Return, by runtime, what it computes from the file: its own answer where it was asked and
        could be measured, else the answer of posenc's emulator."""
        known_results = self.known_results
        answers: dict[str, ComputedPositions] = {}
        for name, own_answer in self.own_answers.items():
            if self.metadata is not None:
                answers[name] = as_loaded(own_answer, self.metadata, self.length)
            else:
                answers[name] = as_computed(
                    own_answer, known_results[name], self.model
                ).with_stop_as_refusal
        return {
            **known_results,
            **{name: answer for name, answer in answers.items() if answer.known != "unknown"},
        }

    @cached_property
    def known_results(self) -> dict[str, ComputedPositions]:
        """Return, by runtime, what posenc's emulator says that it computes from the file."""
        if self.metadata is not None:
            return self._known_results_of_gguf(self.metadata)
        served_config = self.source.config if self.served is None else self.served
        if self.source.spelling == "transformers":
            answers = emulate(served_config, self.length, versions=self.versions)
        else:
            answers = emulate_vendor_file(
                served_config, self.source.spelling, self.length, self.versions
            )
        return {name: computed.with_stop_as_refusal for name, computed in answers.items()}

    def _known_results_of_gguf(self, metadata: Metadata) -> dict[str, ComputedPositions]:
        """Return, by runtime, what is known of it for a GGUF file."""
        name = "llama.cpp"
        version = self.versions.get(name)
        try:
            if version is not None and not is_recorded(name, version):
                computed_by_llama_cpp = unrecorded_version(name, version)
            else:
                computed_by_llama_cpp = compute_from_metadata(metadata, self.length)
        except RefusedError as refusal:
            how_known = "unknown" if isinstance(refusal, NotReadError) else "yes"
            computed_by_llama_cpp = ComputedPositions(
                str(refusal), known=how_known, version=RELEASES[name].read
            )
        result_of_mlx_lm = ComputedPositions("mlx-lm opens no GGUF file", known="no such file")
        unknown_results = {
            r: ComputedPositions(
                f"posenc does not know what {r} computes from GGUF", known="unknown"
            )
            for r in RUNTIMES
        }
        results = {**unknown_results, "mlx-lm": result_of_mlx_lm}
        dated_results = {
            r: replace(result, version=RELEASES[r].read) for r, result in results.items()
        }
        return {**dated_results, name: computed_by_llama_cpp}

    @cached_property
    def aspects_that_contradict_emulator(self) -> dict[str, frozenset[Aspect]]:
        """Return, by runtime that was asked, the aspects in which its own answer differs from
        posenc's emulator of the same version; runtimes without a difference are left out."""
        aspects_by_runtime = {}
        for name, answer in self.computed.items():
            known_result = self.known_results[name]
            if not (
                answer.asked and known_result.is_known and answer.version == known_result.version
            ):
                continue
            if (answer.error is None) != (known_result.error is None):
                aspects_by_runtime[name] = frozenset[Aspect]({"error"})
            elif answer.error is None:
                aspects = differing_aspects(answer, known_result)
                if answer.switch != known_result.switch:
                    aspects |= {"switch"}
                if aspects:
                    aspects_by_runtime[name] = aspects
        return aspects_by_runtime

    @property
    def judged_runtimes(self) -> tuple[str, ...]:
        """Return the named runtimes of which posenc knows what they compute."""
        return tuple(name for name in self.named_runtimes if self.computed[name].is_known)

    def named_runtimes_known_as(self, known: Known) -> tuple[str, ...]:
        """Return the named runtimes of which this is known: "yes" for those whose answer is known,
        be it a refusal; "no model" for those without such an architecture; "no such file" for those
        that do not open files of this kind; "unknown" for those whose code nobody has read."""
        return tuple(name for name in self.named_runtimes if self.computed[name].known == known)

    @property
    def is_opened_by_no_runtime(self) -> bool:
        """Return True if the file can be read by posenc, and by none of the named runtimes."""
        return {self.computed[name].known for name in self.named_runtimes} == {"no such file"}

    def require_known(self) -> None:
        """Raise UnknownFamilyError if nothing can be judged: the family is not known, or no named
        runtime is known to have it."""
        if self.metadata is None:
            require_known_family(self.model)
        if self.is_opened_by_no_runtime:
            return
        if not self.judged_runtimes:
            answers = [(name, self.computed[name]) for name in self.named_runtimes]
            answers_in_words = [
                f"{n}: {c.error if n in self.versions else c.status_in_words}" for n, c in answers
            ]
            own_name = (
                self.model.model_type if self.metadata is None else self.metadata.architecture
            )
            servers = [name for name in ("vllm", "sglang") if name in self.versions]
            hint = (
                ". A server loads a config by the transformers beside it: `--for "
                "transformers==4.57`, or its own release, judges by that"
                if servers and self.metadata is None
                else ""
            )
            raise UnknownFamilyError(f"{own_name}: {'; '.join(answers_in_words)}{hint}")

    @cached_property
    def differences(self) -> dict[str, frozenset[Aspect]]:
        """Return, by runtime, the aspects that differ from the meaning; empty if it agrees or has
        no such model."""
        meant = None if self.meaning is None else self.meaning.computed
        return {name: misread_aspects(computed, meant) for name, computed in self.computed.items()}

    def runtimes_that_differ(
        self, among: Sequence[str], *aspects: Aspect, nothing_else: bool = False
    ) -> tuple[str, ...]:
        """Return those of these runtimes, named or not, that differ from the meaning.

        "arguments" alone is no difference: a runtime that stops for a missing key that is not about
        positions (mlx-lm, for any of its dataclass) says nothing about how it reads them.

        among: the runtimes to look at. aspects: a difference in one of these counts; in any aspect
        if none is given. nothing_else: leave out runtimes that differ in another aspect, too, which
        another rule would explain.
        """
        wanted_aspects = set(aspects) or {*get_args(Aspect)}
        return tuple(
            name
            for name in among
            if (aspects_that_differ := self.differences[name] - {"arguments"}) & wanted_aspects
            and not (nothing_else and aspects_that_differ - wanted_aspects)
        )

    def named_and_known(self, runtimes: Sequence[str]) -> tuple[str, ...]:
        """Return those of these runtimes that the user named and posenc knows."""
        return tuple(name for name in runtimes if name in self.judged_runtimes)

    def named_runtimes_that_differ(self, among: Sequence[str], *aspects: Aspect) -> tuple[str, ...]:
        """Return the named runtimes among these that differ from the meaning."""
        return self.named_and_known(self.runtimes_that_differ(among, *aspects))

    @property
    def rope_scaling(self) -> Mapping[str, Any] | None:
        """Return the config's rope_scaling; None if it is missing, null or empty."""
        value = self.config.get("rope_scaling")
        return value if isinstance(value, Mapping) and value else None

    @property
    def rope_parameters(self) -> Mapping[str, Any] | None:
        """Return the config's rope_parameters; None if they are missing, null or empty."""
        value = self.config.get("rope_parameters")
        return value if isinstance(value, Mapping) and value else None

    def flat_rope_dicts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the name and the content of every flat rope dict of the config: of rope_scaling and
        rope_parameters themselves, or of the dicts for kinds of layers in them."""
        for name, rope_dict in (
            ("rope_scaling", self.rope_scaling),
            ("rope_parameters", self.rope_parameters),
        ):
            if rope_dict is None:
                continue
            dict_by_kind = {
                kind: value for kind, value in rope_dict.items() if isinstance(value, Mapping)
            }
            if not dict_by_kind:
                yield name, rope_dict
            for kind, kind_dict in dict_by_kind.items():
                yield f"{name}.{kind}", kind_dict

    def original_length(self, p: Mapping[str, Any]) -> Any:
        """Return a rope dict's original length, else the top level's; None if there is none."""
        return p.get(ORIGINAL_LENGTH_KEY, self.config.get(ORIGINAL_LENGTH_KEY))

    def num_rotated_pairs(self, p: Mapping[str, Any]) -> int:
        """Return how many pairs of channels a rope dict rotates."""
        share = p.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        share = share if isinstance(share, int | float) else 1.0  # text is reported by PD005
        return (int(self.model.head_dim * share) + 1) // 2

    def rope_dicts_of_type(self, *kinds: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the name and the content of the flat rope dicts of these types; those in
        rope_parameters only without rope_scaling, which most runtimes read instead."""
        for name, p in self.flat_rope_dicts():
            if self.rope_scaling is not None and name.startswith("rope_parameters"):
                continue
            if rope_type_of(p) in kinds:
                yield name, p


def rope_type_of(p: Mapping[str, Any]) -> str:
    """Return the type that a rope dict names: its rope_type, else its type, else "default"."""
    rope_type = p.get("rope_type", p.get("type"))
    return "default" if rope_type is None else str(rope_type)
