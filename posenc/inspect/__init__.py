"""Measure and draw what an encoding does with position."""
