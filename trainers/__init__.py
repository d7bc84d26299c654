"""Training by Lightning: objectives, data, and the callbacks that save a loadable generator."""

from dgm_infer.errors import extra

with extra("train"):
    from .augmentation import Augmentation
    from .data import DigitsData
    from .export import SaveGenerator
    from .flow import FlowMatching, MeanFlow
    from .folder import FolderData
    from .gan import GANTraining
    from .iwae import IWAETraining
    from .mnist import FashionMNISTData, MNISTData
    from .monitoring import HeldOutEvidence, ImageGrids
    from .torchvision_data import CelebAData, OmniglotData
    from .vae import VAETraining

__all__ = [
    "Augmentation",
    "CelebAData",
    "DigitsData",
    "FashionMNISTData",
    "FlowMatching",
    "FolderData",
    "GANTraining",
    "HeldOutEvidence",
    "IWAETraining",
    "ImageGrids",
    "MNISTData",
    "MeanFlow",
    "OmniglotData",
    "SaveGenerator",
    "VAETraining",
]
