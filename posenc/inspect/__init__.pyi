from posenc.inspect.api import run as run
