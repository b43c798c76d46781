"""Somebody else's module, called and measured."""
