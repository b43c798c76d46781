"""ALiBi against the authors' slopes and biases."""

import pytest

from posenc.scores.alibi import ALiBi
from tests.golden_values import Case, cases


@pytest.mark.parametrize("case", cases("alibi"))
def test_alibi_bias(case: Case):
    bias = ALiBi(case.params["heads"])(case.inputs["q_positions"], case.inputs["kv_positions"])
    case.assert_close("bias", bias, where=case.expected["causal_valid"])
