from posenc.compare.api import TrainedModel as TrainedModel
from posenc.compare.api import load as load
from posenc.compare.api import run as run
from posenc.compare.options import Options as Options
from posenc.compare.reports.judge_losses import judge as judge
from posenc.compare.results import Study as Study
