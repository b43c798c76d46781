"""Exports are proved in this process, as in the tests of extend."""

from tests.extend.conftest import proved_here as proved_here
