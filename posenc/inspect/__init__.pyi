from posenc.inspect.api import measure_encodings as measure_encodings
from posenc.inspect.api import measure_model as measure_model
from posenc.inspect.module.measurements import measure_module as measure_module
