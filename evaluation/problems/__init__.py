"""Targets of the published experiments."""
