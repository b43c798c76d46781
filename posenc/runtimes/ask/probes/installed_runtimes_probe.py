"""Say which runtimes this interpreter has.

`posenc.runtimes.ask` runs this text in the interpreter that is asked. It reads a JSON object from
the standard input, runtime -> the packages that its probe imports, and writes another one to the
standard output, runtime -> its version, of those that can be imported. None is imported for that.
"""

import json
import sys
from importlib import metadata, util

versions = {}
for runtime, packages in json.load(sys.stdin).items():
    if all(util.find_spec(package) is not None for package in packages):
        try:
            versions[runtime] = metadata.version(packages[0].replace("_", "-"))
        except metadata.PackageNotFoundError:  # a folder of the same name
            continue
print(json.dumps(versions))
