"""Pooling and shapes of the ResNet for photos."""

import pytest
import torch
from torch.nn import functional as F

from extras.blurred_resnet import MaxBlurPool, resnet18


@pytest.mark.parametrize("size", [8, 7])
def test_max_blur_pool_formula(size):
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    maxima = F.pad(F.max_pool2d(F.pad(images, (1, 1, 1, 1), value=-torch.inf), 3, 1), (1, 1, 1, 1))
    rows = (maxima[:, :, :-2] + 2 * maxima[:, :, 1:-1] + maxima[:, :, 2:]) / 4
    blurred = (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:]) / 4
    torch.testing.assert_close(MaxBlurPool()(images), blurred[:, :, ::2, ::2])


@pytest.mark.parametrize(("image_size", "first"), [(64, 64), (256, 128)])
def test_resnet18_resolutions(image_size, first):
    """The first stage has the image's resolution, or half of it above 192 px."""
    model = resnet18(5, image_size, widths=(8, 8, 8, 16), depths=(1, 1, 1, 2))
    images = torch.randn(2, 3, image_size, image_size)
    assert model(images).shape == (2, 5)
    assert model[:4](images).shape == (2, 8, first, first)  # up to the first stage
    assert model[:-3](images).shape == (2, 16, first // 8, first // 8)  # up to the last stage
