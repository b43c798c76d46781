"""Tune one model in several processes, each with a part of every layer."""
