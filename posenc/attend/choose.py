"""Choose the implementation that runs one attention, and say why the others do not.

There are four, which the argument `impl` names. The code of each is in `posenc/attend/ways`:

    reference  all scores at once: defines what is correct
    blocks     blocks of queries: any encoding, in memory that grows linearly with the length
    sdpa       torch's kernel, in one of five forms (SDPA_FORMS)
    flex       FlexAttention, compiled: on CUDA, on the CPU by name only

For impl="auto" `_cheapest_choice` tries them in an order that depends on the device and the length.
These are chosen on the CPU in float32:

               training              prefill               decoding (up to FEW_QUERIES queries)
    RoPE       sdpa plain            sdpa plain            sdpa plain
    ALiBi, T5  sdpa strips           sdpa strips           sdpa row
    FoX        sdpa key rows         sdpa key rows         sdpa row
    Shaw       sdpa near and far     sdpa near and far     reference
    DeBERTa    reference, blocks     blocks                sdpa row
    CoPE       reference, blocks     blocks                reference

Training on the CPU in 16 bits, or with a bias, over at most SHORT_LENGTH keys is `reference`,
whatever the table says. Of two names, the second one runs if the scores exceed MAX_DENSE_BYTES.
Shaw needs enough keys (MIN_LENGTH_PER_NEAR_KEY).

On CUDA a few queries run as `sdpa row`, too. All longer attention with a bias runs as `reference`
while its scores fit into MAX_DENSE_BYTES, and as `flex` beyond.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from posenc.attend import flex_options, torch_faults
from posenc.attend.problem import Cost, Problem
from posenc.attend.ways import blocks, flash, flex, key_rows, reference, sdpa
from posenc.encodings.numerics.torch_modes import inside_functorch_transform, is_readable

WAYS: dict[str, ModuleType] = {"reference": reference, "blocks": blocks, "sdpa": sdpa, "flex": flex}
SDPA_FORMS = {
    "plain": "torch's kernel computes it",
    "row": "torch's kernel, with a row of bias for each of a few queries",
    "strips": "torch's kernel, which reads the bias by distance as a view of one row per head",
    "key rows": "torch's kernel, which reads one row of bias for each block of queries",
    "near and far": "the encoding's vectors for near keys, torch's kernel for all others",
}
FEW_QUERIES = 8
"""Maximum number of queries for which torch's kernel gets the full bias as a mask."""
SHORT_LENGTH = 512
"""Maximum number of keys at which dense softmax attention trains faster on the CPU than the flash
kernel, in 16 bits or with a bias. In plain float32 a step at 128 keys is 10 % faster with flash."""
MIN_LENGTH_PER_NEAR_KEY = 16
"""Factor of the form "near and far": it needs at least this many queries for each key that counts
as near, and at least SHORT_LENGTH queries to train, or SHORT_LENGTH / 4 otherwise."""
MAX_DENSE_BYTES = 32 * 2**20
"""Maximum bytes of scores and weights that are computed all at once."""
MAX_DENSE_INFERENCE_BYTES = 4 * 2**20
"""The same on the CPU without gradients. It is less, because smaller blocks stay in the CPU's
cache."""


@dataclass(frozen=True)
class Choice:
    """Name the implementation that runs an attention, and say why it was chosen."""

    impl: str
    """Name of the implementation, a key of WAYS."""
    reason: str
    """Why it was chosen, in a few words for `explain`."""
    form: str = ""
    """One of SDPA_FORMS if `impl` is "sdpa", else ""."""
    is_named_by_caller: bool = False
    """True if the caller named this implementation, so that no other may run."""

    def run(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention (batch, num_heads, q_len, v_dim), and the log-sum-exp
        (batch, num_heads, q_len) if the problem needs it, else None.

        Raises: ValueError if the caller named FlexAttention, and torch cannot build its kernel.
        """
        if self.impl == "sdpa":
            return sdpa.run(problem, self.form)
        try:
            return WAYS[self.impl].run(problem)
        except flex.KernelTooLarge:
            # From now on `why_cannot_run` says so: this chooses another way, or raises.
            return choose(problem, "flex" if self.is_named_by_caller else "auto").run(problem)

    def cost(self, problem: Problem) -> Cost:
        """Return the expected time and memory of the problem, run by this implementation."""
        if self.impl == "sdpa":
            return sdpa.cost(problem, self.form)
        return WAYS[self.impl].cost(problem)


def choose(problem: Problem, impl: str = "auto") -> Choice:
    """Return the implementation named by `impl`. For "auto" return the one that is expected to be
    the cheapest of those that can run.

    Raises: ValueError for an unknown name, or an implementation that cannot run this problem.
    """
    if impl == "auto":
        return _cheapest_choice(problem)
    if impl not in WAYS:
        raise ValueError(f"attention: unknown impl {impl!r}; known: auto, {', '.join(WAYS)}.")
    why_not = why_cannot_run(problem, impl)
    if why_not:
        raise ValueError(
            f"attention: impl={impl!r} cannot run {type(problem.encoding).__name__}: {why_not}."
        )
    form = ""
    reason = "selected by name"
    if impl == "sdpa":
        form, _ = sdpa_form(problem)
    elif impl == "flex":
        reason += _backend_note(problem)
    return Choice(
        impl, reason + _repeated_heads_note(problem, impl, form), form, is_named_by_caller=True
    )


def reasons_against_others(problem: Problem, chosen: str) -> dict[str, str]:
    """Return why each other implementation was not chosen, by its name.

    chosen: the name of the implementation that was chosen, which gets no entry.
    """
    reason_by_name = dict.fromkeys(WAYS, "expected to be slower here")
    if problem.q.device.type == "cpu":
        reason_by_name["flex"] = "compiling takes seconds; select it by name"
    return {
        name: why_cannot_run(problem, name) or reason_by_name[name]
        for name in WAYS
        if name != chosen
    }


def why_cannot_run(problem: Problem, impl: str) -> str | None:
    """Return why the implementation `impl` cannot run this problem; None if it can."""
    match impl:
        case "sdpa":
            form, why_not = sdpa_form(problem)
            return None if form else why_not
        case "flex":
            return _why_not_flex(problem)
        case "blocks" if inside_functorch_transform():
            return "torch.func's transforms do not support recomputation"
    return None


def _cheapest_choice(problem: Problem) -> Choice:
    """Return the implementation that is expected to be the cheapest. The first condition that holds
    decides. The conditions are in the order of measured speed, which is not the order of WAYS:
    dense scores are the fastest for short training, and the last resort for long texts."""
    on_cpu = problem.q.device.type == "cpu"
    dense_scores_fit = _dense_scores_fit(problem)
    is_short = dense_scores_fit and problem.kv_len <= SHORT_LENGTH
    trains_on_cpu = on_cpu and problem.needs_grad
    if is_short and trains_on_cpu and _trains_slower_by_flash(problem):
        return Choice("reference", "short rows that need gradients")

    form, _ = sdpa_form(problem)
    if form:
        return Choice("sdpa", SDPA_FORMS[form] + _repeated_heads_note(problem, "sdpa", form), form)

    if not on_cpu and not dense_scores_fit and _why_not_flex(problem) is None:
        reason = "one fused kernel with the encoding's score_mod"
        return Choice("flex", reason + _backend_note(problem))

    return _cheapest_without_fused_kernel(problem, dense_scores_fit)


def _cheapest_without_fused_kernel(problem: Problem, dense_scores_fit: bool) -> Choice:
    """Return the cheaper of "blocks" and "reference", one of which computes any encoding.

    dense_scores_fit: the result of `_dense_scores_fit` for the problem.
    """
    blocks_can_run = why_cannot_run(problem, "blocks") is None
    if blocks_can_run and blocks.takes_bias_as_mask(problem):
        reason = "torch's kernel reads the encoding's bias as a mask"
        return Choice("blocks", reason + _repeated_heads_note(problem, "blocks"))
    if dense_scores_fit:
        return Choice("reference", "the scores are small")
    if blocks_can_run:
        return Choice("blocks", "the scores are too large to compute at once")
    return Choice("reference", "nothing else can run here")


def _dense_scores_fit(problem: Problem) -> bool:
    """Return True if scores and weights of all pairs are small enough to compute all at once."""
    infers_on_cpu = problem.q.device.type == "cpu" and not problem.needs_grad
    scores_and_weights_bytes = 2 * problem.scores_bytes(problem.q_len)
    max_bytes = MAX_DENSE_INFERENCE_BYTES if infers_on_cpu else MAX_DENSE_BYTES
    return scores_and_weights_bytes <= max_bytes


def _backend_note(problem: Problem) -> str:
    """Return ", backend NAME: WHY", which names FlexAttention's backend and says why it runs. It is
    appended to the reason of a choice."""
    backend, reason = flex_options.backend_and_reason(problem)
    return f", backend {backend}: {reason}"


def _repeated_heads_note(problem: Problem, impl: str, form: str = "") -> str:
    """Return the words "; keys and values are repeated ..." for the reason of a choice, or "" if
    they are not. They are where this release of torch computes wrongly if several query heads share
    a head of keys.

    impl, form: the choice; `form` is one of SDPA_FORMS if `impl` is "sdpa".
    """
    if impl == "blocks":
        runs_operators = blocks.takes_bias_as_mask(problem)
    else:
        runs_operators = impl == "sdpa" and form != "plain"
    shares_heads = problem.q.shape[1] != problem.k.shape[1]
    on_cpu = problem.q.device.type == "cpu"
    may_repeat_heads = runs_operators and shares_heads and on_cpu
    # Read last: the first call tries the kernels, unless this release is known.
    if not (may_repeat_heads and torch_faults.faults().reads_grouped_heads_wrongly):
        return ""
    what_is_repeated = "keys and values are repeated for every head"
    return f"; {what_is_repeated}, because torch {torch_faults.RELEASE} reads shared heads wrongly"


def _trains_slower_by_flash(problem: Problem) -> bool:
    """Return True if torch's flash kernel trains slower than dense scores on few keys (the caller
    checks that there are few)."""
    if _term_attends_to_near_keys(problem):
        return False
    multiplies_16_bits = problem.q.dtype in (torch.bfloat16, torch.float16) or problem.is_autocast
    return multiplies_16_bits or problem.term is not None


def sdpa_form(problem: Problem) -> tuple[str, str]:
    """Return (form, "") if torch's kernel can run the problem in a form of SDPA_FORMS. Otherwise
    return ("", why not).

    A problem may fit several forms, and the first one below that it fits runs. With a term, which
    changes the scores:

    - "row" needs one call of the kernel, whatever the bias.
    - "near and far" fits terms with a vector for each near distance, which no form below it takes.
    - "strips" leaves out what a window hides. It is the only other form with a log-sum-exp.
    - "key rows" comes last, because only the numbers of its bias tell whether it can run, and
      reading them takes time.

    Without a term:

    - "strips", only if there is a window or a log-sum-exp is needed.
    - "plain" needs no more than the kernel, and has no log-sum-exp.
    """
    if inside_functorch_transform():
        return "", "torch.func's transforms do not support its kernels"
    if problem.dropout_p:
        return "", "only reference and blocks apply dropout"
    if problem.term is None:
        return _sdpa_form_without_term(problem)
    has_few_queries = problem.q_len <= FEW_QUERIES and not problem.needs_lse
    if has_few_queries and _kernel_takes_term_as_mask(problem):
        return "row", ""
    if _term_attends_to_near_keys(problem):
        return "near and far", ""
    why_not_strips = _why_not_strips(problem)
    if why_not_strips is None:
        return "strips", ""
    if problem.needs_lse:
        return "", _why_no_lse(why_not_strips)
    return _key_rows_form(problem, why_not_strips)


def _sdpa_form_without_term(problem: Problem) -> tuple[str, str]:
    """Return the same as `sdpa_form`, for a problem without a term: (form, ""), where the form is
    "plain" or "strips", or ("", why not)."""
    if not problem.needs_lse and not _has_window(problem):
        return _plain_form(problem)
    why_not_strips = _why_not_strips(problem)
    if why_not_strips is None:
        return "strips", ""
    if problem.needs_lse:
        return "", _why_no_lse(why_not_strips)
    return _plain_form(problem)


def _key_rows_form(problem: Problem, why_not_strips: str) -> tuple[str, str]:
    """Return ("key rows", ""), or ("", why not) if that form cannot run the problem either.

    why_not_strips: why the form "strips" cannot run it, which the answer repeats.
    """
    why_not_key_rows = _why_not_key_rows(problem)
    if why_not_key_rows is None:
        return "key rows", ""
    return "", f"{why_not_strips}; {why_not_key_rows}"


def _plain_form(problem: Problem) -> tuple[str, str]:
    """Return ("plain", "") if torch's kernel can run the problem without a bias. Return ("", why
    not) on the CPU if scaled_dot_product_attention computes wrongly in this release of torch."""
    fault = torch_faults.faults().function_fault if problem.q.device.type == "cpu" else ""
    return ("", fault) if fault else ("plain", "")


def _why_no_lse(why_not_strips: str) -> str:
    """Return why torch's kernel gives no log-sum-exp: only the form "strips" does, and it cannot
    run, for the reason `why_not_strips`."""
    return f"the log-sum-exp comes with strips of queries, and {why_not_strips}"


def _has_window(problem: Problem) -> bool:
    """Return True if the mask hides keys from some distance on."""
    return problem.mask is not None and problem.mask.window is not None


def _kernel_takes_term_as_mask(problem: Problem) -> bool:
    """Return True if a kernel of torch takes the term as an additive mask: on CUDA for any term
    without gradients, dropout or compilation, elsewhere where `blocks.takes_bias_as_mask` says so.

    This is the fastest way for few queries: one query and 32,768 keys, 4 rows and 16 heads of 128
    channels in bfloat16, take an H100 0.41 to 0.53 ms with such a mask, 0.35 without, 1.3 by
    FlexAttention with ALiBi's formula, and 2.9 by `reference`.
    """
    if problem.q.device.type == "cuda":
        return problem.kv_len > 0 and blocks.is_inference_with_bias(problem)
    return blocks.takes_bias_as_mask(problem)


def _term_attends_to_near_keys(problem: Problem) -> bool:
    """Return True if the form "near and far" can run: the term itself attends to the keys near each
    query, and there are enough far keys for torch's kernel."""
    term = problem.term
    if term is None or term.far_from is None or torch.compiler.is_compiling():
        return False
    least_length = SHORT_LENGTH if problem.needs_grad else SHORT_LENGTH // 4
    if problem.q_len < max(least_length, MIN_LENGTH_PER_NEAR_KEY * term.far_from):
        return False
    # The term computes its vectors from q as it came, and its positions are indices.
    q_is_untransformed = problem.q is problem.queries.x
    is_causal_by_index = problem.query_offset == 0 and problem.is_causal_by_index
    return q_is_untransformed and is_causal_by_index and flash.runs_on(problem.q.device)


def _why_not_strips(problem: Problem) -> str | None:
    """Return why the form "strips", in which torch's kernel reads the bias by distance as a view of
    one row per head, cannot run the problem; None if it can."""
    term = problem.term
    mask = problem.mask
    if why_not := flash.why_cannot_run_on(problem.q.device):
        return why_not
    if term is not None and (term.by_distance is None or term.sum_values is not None):
        return "it changes scores or values, which these kernels do not expose"
    if mask is not None and not mask.exact:
        return "the mask is not only causality and a window"
    mask_lacks_offset = mask is not None and problem.mask_query_offset is None
    term_lacks_offset = term is not None and problem.query_offset is None
    if mask_lacks_offset or term_lacks_offset:
        return "the positions are not known to be consecutive"
    return None


def _why_not_key_rows(problem: Problem) -> str | None:
    """Return why the form "key rows", in which torch's kernel reads one row of bias for each block
    of queries, cannot run the problem; None if it can."""
    term = problem.term
    if why_not := flash.why_cannot_run_on(problem.q.device):
        return why_not
    if not is_readable(problem.q):
        return "its blocks depend on values that only uncompiled code on the CPU reads"
    if problem.mask is None or not problem.mask.causal:
        return "a bias per key suffices under a causal mask only"
    if term is None or term.query_and_key_bias is None or term.sum_values is not None:
        return "the bias is no term of the query minus a term of the key"
    if problem.q.numel() == 0 or problem.kv_len == 0:
        return None  # without queries or keys no number can be too large
    return key_rows.why_cannot_run(problem)


def _why_not_flex(problem: Problem) -> str | None:
    """Return why FlexAttention cannot run the problem; None if it can."""
    if torch.compiler.is_compiling():
        return "it is compiled itself and cannot be nested"
    if problem.dropout_p:
        return "only reference and blocks apply dropout"
    if why_not := _why_not_flex_for_term(problem):
        return why_not
    if problem.q.dtype == torch.float64:
        return "it supports float32, bfloat16 and float16 only"
    if inside_functorch_transform():
        return "torch.func's transforms do not support its kernels"
    if why_not := _why_not_flex_on_device(problem):
        return why_not
    if flex.kernel_is_too_large(problem):
        return "torch could not build its kernel, which needs more shared memory than the GPU has"
    return None


def _why_not_flex_for_term(problem: Problem) -> str | None:
    """Return why a score_mod cannot compute the problem's term; None if it can."""
    term = problem.term
    if term is None:
        return None
    if term.sum_values is not None:
        return "the encoding reads the attention weights"
    if term.make_score_mod is None:
        return "the encoding reads whole rows of scores"
    return None


def _why_not_flex_on_device(problem: Problem) -> str | None:
    """Return why FlexAttention cannot run the problem on its device; None if it can."""
    match problem.q.device.type:
        case "cuda":
            return _why_not_flex_on_cuda(problem)
        case "cpu":
            return _why_not_flex_on_cpu(problem)
        case device:
            return f"it runs on CPU and CUDA, not on {device}"


def _why_not_flex_on_cuda(problem: Problem) -> str | None:
    """Return why FlexAttention cannot run the problem on CUDA, apart from reasons that hold on
    every device; None if it can."""
    head_width = min(problem.q.shape[-1], problem.v.shape[-1])
    if head_width < 16:  # Triton multiplies no smaller tiles, and torch refuses such heads
        return "on CUDA it needs heads of at least 16 channels"
    must_be_deterministic = torch.are_deterministic_algorithms_enabled()
    if must_be_deterministic and flex_options.adds_bias_gradient_atomically(problem):
        return "it adds the bias's gradient atomically, and deterministic algorithms are enabled"
    return None


def _why_not_flex_on_cpu(problem: Problem) -> str | None:
    """Return why FlexAttention cannot run the problem on the CPU, apart from reasons that hold on
    every device; None if it can."""
    if problem.needs_grad:
        return "FlexAttention has no backward pass on the CPU"
    if problem.needs_lse:
        return "FlexAttention gives no log-sum-exp on the CPU"
    return None
