from posenc.testing.as_pytest import test_contract as test_contract
from posenc.testing.checks import CHECKS as CHECKS
from posenc.testing.checks import VOIDING_FAILURES as VOIDING_FAILURES
from posenc.testing.checks import Verdict as Verdict
from posenc.testing.checks import every_check as every_check
from posenc.testing.checks import maker as maker
from posenc.testing.checks import verdicts as verdicts
from posenc.testing.claims import note_on_missing_source as note_on_missing_source
