"""What posenc knows of each runtime: from a config.json's dict and a length to what it computes.

A runtime has two files here. NAME.json has its facts, a line a family, and the releases they were
read from; NAME.py has a typed field for each fact, and the emulator that computes by them.
registry.py lists the runtimes, says how one is added, and has what their emulators share.
"""

from posenc.runtimes.known.registry import RUNTIMES, Emulator, emulate
from posenc.runtimes.known.releases import RELEASES, RELEASES_IN_WORDS, VERSIONS_AS_READ

__all__ = ["RELEASES", "RELEASES_IN_WORDS", "RUNTIMES", "VERSIONS_AS_READ", "Emulator", "emulate"]
