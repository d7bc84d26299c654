"""Suppression of Lightning's remarks on the screen."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.warnings import PossibleUserWarning

__all__ = ["quiet"]

# Lightning's loggers that repeat what the command prints in two lines.
TALKERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.callbacks.model_summary",
    "lightning.pytorch.trainer.connectors.signal_connector",
    "lightning.fabric",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, suppress Lightning's tips and advice but not its warnings about real trouble."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=PossibleUserWarning)
            # every run has its own folder, even a resumed one
            warnings.filterwarnings("ignore", "The dirpath has changed from")
            # Lightning 2.6 asks an outdated question of PyTorch 2.15's pytrees
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended to run from within Python")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
