"""Implementations of one attention: `reference` defines the result, the others are cheaper."""
