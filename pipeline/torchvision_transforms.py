"""Transforms of torchvision.transforms.v2 in a config list: `v2.RandAugment: {num_ops: 2}`.

torchvision takes a second to import, so it is imported only if a config names one of them: in the
training process to check the parameters, and in a worker at its first image.
"""

import inspect
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from conf.packages import import_torchvision
from pipeline.decode import Picture, as_tensor

# Transforms that need only one image and their own draws, and keep the size and uint8.
NAMES = (
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "ElasticTransform",
    "GaussianBlur",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomAutocontrast",
    "RandomChannelPermutation",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomInvert",
    "RandomPerspective",
    "RandomPhotometricDistort",
    "RandomPosterize",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "TrivialAugmentWide",
)


@dataclass(frozen=True)
class TorchvisionTransform:
    """Apply a v2 transform to one image; it draws from torch's generator, seeded from the sample's.

    Args:
        name: one of NAMES.
        parameters: keyword arguments of its constructor.
    """

    name: str
    parameters: dict[str, Any]

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        pixels = as_tensor(picture.pixels()).permute(2, 0, 1)  # uint8 [3, H, W]
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which also seeds the GPUs' generators.
            torch.default_generator.manual_seed(rng.getrandbits(63))
            made = self._transform(pixels.clone(memory_format=torch.contiguous_format))
        return Picture(made.permute(1, 2, 0).numpy())

    @cached_property
    def _transform(self) -> Any:
        return _constructor(self.name)(**self.parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cached transform: unpickling it would import torchvision when a worker starts.
        return TorchvisionTransform, (self.name, self.parameters)


@dataclass(frozen=True)
class V2Factory:
    """Check the parameters of a v2 transform and build it; has the signature of its constructor."""

    name: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_constructor(self.name))

    def __call__(self, **parameters: Any) -> TorchvisionTransform:
        transform = TorchvisionTransform(self.name, parameters)
        picture = Picture(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8))
        try:
            # Invalid values often raise an error only when it is applied, and only for some draws.
            for seed in range(8):
                transform(picture, random.Random(seed))
        except Exception as error:  # torchvision raises many kinds
            raise ValueError(f"{str(error).rstrip('.')}; check {parameters}") from None
        return transform


V2_TRANSFORMS = {f"v2.{name}": V2Factory(name) for name in NAMES}


def _constructor(name: str) -> Any:
    import_torchvision()
    from torchvision.transforms import v2

    return getattr(v2, name)
