from posenc.hf.checkpoint.position_losses import losses_by_position as losses_by_position
from posenc.testing.contract import CHECKS as CHECKS
from posenc.testing.contract import maker as maker
from posenc.testing.contract import test_contract as test_contract
from posenc.testing.contract import verdicts as verdicts
