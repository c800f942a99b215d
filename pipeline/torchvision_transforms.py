"""Transforms of torchvision.transforms.v2 in a config list: `v2.RandAugment: {num_ops: 2}`.

torchvision takes a second to import, so it is imported only if a config names one of them: in the
training process to check the parameters, and in a worker at its first image.
"""

import random
from functools import cached_property, partial
from typing import Any

import torch

from conf.packages import import_torchvision
from pipeline.decode import Picture

# Transforms that need only one image and their own draws, and keep the size and uint8.
NAMES = (
    *("AugMix", "AutoAugment", "ElasticTransform", "RandAugment", "RandomAffine"),
    *("RandomPerspective", "RandomRotation", "RandomVerticalFlip", "TrivialAugmentWide"),
    *("ColorJitter", "GaussianBlur", "RandomAdjustSharpness", "RandomAutocontrast"),
    *("RandomChannelPermutation", "RandomEqualize", "RandomErasing", "RandomGrayscale"),
    *("RandomInvert", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize"),
)


class TorchvisionTransform:
    """Apply a v2 transform to one image; it draws from torch's generator, seeded from the sample's.

    `name` is one of NAMES, `parameters` are the arguments of its constructor.
    """

    def __init__(self, name: str, **parameters: Any) -> None:
        self.name, self.parameters = name, parameters
        self._transform  # noqa: B018 - refuses wrong parameters now

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        pixels = torch.from_dlpack(picture.pixels()).permute(2, 0, 1)  # [C, H, W]
        pixels = pixels.clone(memory_format=torch.contiguous_format)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which also seeds the GPUs' generators.
            torch.default_generator.manual_seed(rng.getrandbits(63))
            pixels = self._transform(pixels).permute(1, 2, 0)
        return Picture(pixels.numpy(), moved=True)

    @cached_property
    def _transform(self) -> Any:
        import_torchvision()
        from torchvision.transforms import v2

        return getattr(v2, self.name)(**self.parameters)

    def __getstate__(self) -> dict[str, Any]:
        # Without the v2 transform: unpickling it would import torchvision when a worker starts.
        return {"name": self.name, "parameters": self.parameters}


V2_TRANSFORMS = {f"v2.{name}": partial(TorchvisionTransform, name) for name in NAMES}
