"""Measure the spec sheet of an encoding."""
