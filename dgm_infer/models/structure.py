"""Declared structures of Jacobians."""

from typing import NamedTuple

__all__ = ["STRUCTURES", "Units"]

STRUCTURES = ("independent", "markov", "dense")


class Units(NamedTuple):
    """Structure of a Jacobian ``[A | blockdiag(D_1, ..., D_U)]``."""

    n_global: int
    """Columns of A: the global inputs."""
    inputs: int = 1
    """Local inputs of a unit, columns of every D."""
    outputs: int = 1
    """Outputs of a unit, rows of every D."""

    @property
    def is_scalar(self) -> bool:
        return self.inputs == self.outputs == 1
