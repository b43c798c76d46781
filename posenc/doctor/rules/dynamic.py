"""The type dynamic, which means something else in each runtime."""

from collections.abc import Iterator

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.runtimes.files.json_object import in_json_words


@rule("PD025", "E")
def report_dynamic_ntk(case: Case) -> Iterator[Hit]:
    """Report a rope dict of the type dynamic, from which runtimes compute different frequencies: by
    the current length, by a fixed one, or none at all."""
    readers = tuple(
        r for r in ("vllm", "sglang", "mlx-lm", "llama.cpp") if case.computed[r].is_known
    )
    for name, p in case.rope_dicts_of_type("dynamic"):
        factor = p.get("factor", p.get("alpha"))
        # vLLM's are fixed and llama.cpp's plain: wrong at other lengths, if not at the judged one.
        unscaled_readers = case.named_and_known(("vllm", "llama.cpp")) if "alpha" not in p else ()
        concerned = tuple(
            dict.fromkeys((*case.named_runtimes_that_differ(readers), *unscaled_readers))
        )
        # alpha is a fixed factor, so runtimes that agree with it agree at every length. Without it,
        # even runtimes that nobody named differ at some length: then the hit is a warning.
        if not concerned and "alpha" in p:
            continue
        yield Hit(
            f"{name} is dynamic with factor {in_json_words(factor)} on "
            f"{case.model.max_positions} tokens: other frequencies, below or beyond them, "
            f"in {join_runtimes(concerned or readers)}",
            concerned=concerned,
            affected=readers,
        )
