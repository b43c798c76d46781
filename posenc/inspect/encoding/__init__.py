"""The spec sheet of an encoding."""
