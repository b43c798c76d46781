from posenc.inspect.from_python import run as run
