"""Network bodies that the models share."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

__all__ = ["mlp"]


def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Fully connected layers ``sizes[0] -> ... -> sizes[-1]``, the activation after each but the last.

    The default is smooth: Hamiltonian dynamics follow gradients of the network's own derivatives.
    """
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])
