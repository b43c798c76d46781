from posenc.extend.api import run as run
from posenc.extend.extension import evaluate as evaluate
from posenc.extend.extension import extend as extend
from posenc.extend.options import Options as Options
from posenc.extend.recommendation import Outcome as Outcome
from posenc.hf.tune_config import TuneConfig as TuneConfig
