"""Training by Lightning: objectives, data, and the callbacks that leave a loadable generator behind."""

from .augmentation import Augmentation
from .data import DigitsData
from .export import SaveGenerator
from .iwae import IWAETraining
from .mnist import MNISTData
from .vae import VAETraining

__all__ = ["Augmentation", "DigitsData", "IWAETraining", "MNISTData", "SaveGenerator", "VAETraining"]
