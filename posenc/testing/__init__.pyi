from posenc.testing.claims import note_on_missing_source as note_on_missing_source
from posenc.testing.contract import CHECKS as CHECKS
from posenc.testing.contract import VOIDING_FAILURES as VOIDING_FAILURES
from posenc.testing.contract import Verdict as Verdict
from posenc.testing.contract import every_check as every_check
from posenc.testing.contract import maker as maker
from posenc.testing.contract import test_contract as test_contract
from posenc.testing.contract import verdicts as verdicts
