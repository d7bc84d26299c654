"""The colours that all pictures share."""

__all__ = ["COLOURS", "TRUTH"]

COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00")
"""Okabe and Ito's, which colour-blind readers can tell apart; one per method."""

TRUTH = "#d55e00"
"""The value or the data that generated a problem."""
