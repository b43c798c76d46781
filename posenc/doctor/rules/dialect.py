"""Dialects of a file: two dicts, two bases, numbers as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from posenc.dialects.meaning import NUMBERS, differing_keys
from posenc.doctor.case import ALL, Case, type_of
from posenc.doctor.rule import Hit, names, rule

OLD_READERS = ("transformers-4", "mlx-lm")
BOTH = "Write both dialects: the same dict as rope_scaling and rope_parameters, and rope_theta."


@rule(
    "PD001",
    "E",
    "rope_parameters without the older spelling beside it",
    cure=f"{BOTH} `posenc doctor --fix` does it.",
    evidence="marin #7146, MarinFold #184 and #198 (0.77 nats per token), vllm #44158",
)
def only_new(case: Case) -> Iterator[Hit]:
    """transformers 4 and most of mlx-lm's model files do not know rope_parameters: without a
    top-level rope_theta and rope_scaling they compute the class's default base, mostly 10000, and
    no scaling, and say nothing."""
    if case.new is None or case.old is not None:
        return
    lost = []
    nested = any(isinstance(v, Mapping) for v in case.new.values())
    inner = case.new.get("rope_theta")
    outer = {"rope_theta", "rotary_emb_base"} & case.config.keys()
    if not outer and (inner is not None or nested):
        lost.append(f"rope_theta {inner:g}" if isinstance(inner, int | float) else "rope_theta")
    kinds = {kind for _, p in case.dicts() if (kind := type_of(p)) != "default"}
    lost += sorted(kinds)
    if not lost:
        return
    readers = tuple(r for r in OLD_READERS if case.computed[r].knows) or OLD_READERS
    affected = case.affected(readers)
    yield Hit(
        f"rope_parameters alone holds {names(lost)}, not read by {names(affected or readers)}",
        case.only_named(affected),
        affected or readers,
    )


@rule(
    "PD002",
    "E",
    "rope_scaling and rope_parameters differ",
    cure="Delete the one that is wrong, and write the other in both dialects.",
    evidence="transformers 5 takes rope_scaling where both are set; its own save keeps the other",
)
def two_dicts(case: Case) -> Iterator[Hit]:
    """Whoever edits one of two dicts is heard by half of the readers."""
    if case.old is None or case.new is None:
        return
    keys = differing_keys(case.old, case.new, case.config)
    if keys:
        said = ", ".join(f"{k} {case.old.get(k)!r} and {case.new.get(k)!r}" for k in keys[:4])
        yield Hit(f"rope_scaling and rope_parameters differ: {said}", (), ALL, True)


@rule(
    "PD003",
    "E",
    "rope_theta inside and outside of the rope dict differ",
    cure="Make them equal.",
    evidence="slime #1720; transformers 4 and mlx-lm take the outer one, the others the inner",
)
def two_bases(case: Case) -> Iterator[Hit]:
    """Half of the readers take one, half the other."""
    outer = case.config.get("rope_theta")
    if not isinstance(outer, int | float):
        return
    for name, p in case.dicts():
        inner = p.get("rope_theta")
        local = "sliding" in name or "local" in name
        if isinstance(inner, int | float) and inner != outer and not local:
            yield Hit(
                f"rope_theta is {outer:g} at the top level and {inner:g} in {name}",
                case.concerned(ALL, "frequencies"),
                ALL,
                contradiction=True,
            )
            return


@rule(
    "PD004",
    "E",
    "no rope_theta anywhere",
    cure="Write rope_theta, with the base that the model was trained with.",
    evidence="transformers #45030, #45036; ollama #2379; class defaults differ between runtimes",
)
def no_base(case: Case) -> Iterator[Hit]:
    """Each runtime then takes its own default: for Qwen 2, 10000 in transformers and 1,000,000 in
    mlx-lm."""
    bases = ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "global_rope_theta")
    if case.metadata is not None or not case.source.config:
        return
    given = [case.config.get(b) for b in bases] + [p.get("rope_theta") for _, p in case.dicts()]
    if any(value is not None for value in given):
        return
    if case.model.known and case.meaning is None:
        return
    affected = tuple(r for r in ALL if case.differences[r])
    yield Hit(
        f"no rope_theta anywhere; each runtime takes its default for {case.model.model_type}",
        case.concerned(ALL, "frequencies", "error"),
        affected or ALL,
    )


@rule(
    "PD005",
    "E",
    "a number is written as text",
    cure="Write it without quotes.",
    evidence="lmdeploy #4304; every runtime stops with a TypeError, some after loading the weights",
)
def text_for_number(case: Case) -> Iterator[Hit]:
    """JSON keeps "4.0" a string, and arithmetic on it stops."""
    places = [("the top level", case.config), *case.dicts()]
    for place, values in places:
        for name in NUMBERS:
            value = values.get(name)
            if isinstance(value, str | bool):
                yield Hit(
                    f"{name} in {place} is {value!r}, expected a number", case.concerned(ALL), ALL
                )
