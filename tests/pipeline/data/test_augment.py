"""Transforms of single images: seeded, equal to torchvision's, with checked parameters."""

import io
import itertools
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.data.augment import TRANSFORMS, Compose, build_by_name, transform_target
from pipeline.data.decode import JpegFile, Picture, open_picture
from tests.helpers.drawings import draw_image
from tests.reliability.odd_images import encoded, exif

PHOTO = draw_image("dots", np.random.default_rng(3)).resize((300, 260))


def one(name: str, **parameters: Any) -> Any:
    return build_by_name([{name: parameters}], TRANSFORMS, key="augment.train")[0]


def made(transform: Any, image: Image.Image, seed: int = 0) -> np.ndarray:
    return Compose([transform])(Picture(np.asarray(image)), random.Random(seed)).pixels()


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.1, 10.0), (2.0, 2.0)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.0001, 0.001), (1.0, 1.0)])
def test_random_resized_crop_inside_image(scale, ratio):
    crop = one("random_resized_crop", size=8, scale=scale, ratio=ratio)
    sizes = [(1, 1), (1, 500), (2, 3), (300, 200), (4000, 20)]
    for (width, height), seed in itertools.product(sizes, range(30)):
        left, top, right, bottom = crop.box(width, height, random.Random(seed))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


@pytest.mark.parametrize("size", [(30, 1000), (1000, 30)])
def test_random_resized_crop_fallback_equals_torchvision(size):
    from torchvision.transforms import RandomResizedCrop as Theirs

    left, top, *end = one("random_resized_crop", size=8, scale=(1, 1)).box(*size, random.Random(0))
    theirs = Theirs.get_params(torch.empty(3, size[1], size[0]), [1.0, 1.0], [3 / 4, 4 / 3])
    assert (top, left, end[1] - top, end[0] - left) == tuple(theirs)


@pytest.mark.parametrize("padding_mode", ["constant", "reflect"])
def test_crop_padding_equals_torchvision(padding_mode):
    """The padding may be wider than the image, and files may not be decoded yet."""
    from torchvision.transforms.v2 import functional

    data = encoded(PHOTO.resize((20, 15)))
    image = Image.open(io.BytesIO(data))
    for padding in (4, 45):
        crop = one("random_crop", size=13, padding=padding, padding_mode=padding_mode)
        padded = functional.pad(image, [padding], padding_mode=padding_mode)
        for seed in range(30):
            drawn = crop(open_picture(data, "pillow"), random.Random(seed))
            left, top, *_ = (edge + padding for edge in drawn.geometry[0].box)
            theirs = functional.crop(padded, top, left, 13, 13)
            np.testing.assert_array_equal(drawn.pixels(), theirs)
    for size in range(10, 44):
        theirs = functional.center_crop(image, [size])
        np.testing.assert_array_equal(made(one("center_crop", size=size), image), theirs)
    assert made(one("resize", size=8, side="longer"), PHOTO.resize((90, 2))).shape == (1, 8, 3)
    with pytest.raises(ValueError, match="smaller than size 11"):
        made(one("random_crop", size=11), PHOTO.resize((10, 12)))


PARAMETERS: dict[str, dict[str, Any]] = {
    "AugMix": {},
    "ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "ElasticTransform": {},
    "GaussianBlur": {"kernel_size": 5, "sigma": [0.1, 2.0]},
    "RandomAffine": {"degrees": 30},
    "RandomErasing": {},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_v2_transform_equals_torchvision(image_root, name):
    """torchvision gets the file's pixels, RGB in uint8."""
    from torchvision.transforms import v2

    parameters = PARAMETERS[name]
    transform, changed = one(f"v2.{name}", **parameters), 0
    path = next((image_root / "train" / "dots").iterdir())
    image = v2.functional.pil_to_tensor(Image.open(path))
    for seed in range(4 if name == "ElasticTransform" else 12):
        pixels = open_picture(path.read_bytes(), "pillow").pixels()
        ours = transform(pixels.copy(), random.Random(seed))
        torch.manual_seed(random.Random(seed).getrandbits(63))
        theirs = getattr(v2, name)(**parameters)(image)
        assert (ours.dtype, theirs.shape) == (np.uint8, image.shape)
        np.testing.assert_array_equal(ours, theirs.permute(1, 2, 0).numpy())
        changed += not torch.equal(theirs, image)
    assert changed


def test_v2_transform_keeps_global_generator():
    """Draws are the same in a worker, which gets the transform without torchvision's."""
    transform = one("v2.RandomErasing", p=1)
    before = torch.get_rng_state()
    first = made(transform, PHOTO, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    given = pickle.dumps(transform)
    assert b"torchvision.transforms" not in given
    for again in (transform, pickle.loads(given)):
        np.testing.assert_array_equal(made(again, PHOTO, seed=1), first)
    assert not np.array_equal(made(transform, PHOTO, seed=2), first)


# An image that is its own mask, made of asymmetric blocks of 20 px with two levels.
MASK = np.random.default_rng(5).integers(1, 3, (7, 8)).repeat(20, 0).repeat(20, 1)[:, :155]
IMAGE = np.stack([MASK * 100] * 3, axis=-1).astype(np.uint8)
FLIP: Any = "horizontal_flip"
CROP: Any = {"random_crop": {"size": 150, "padding": 40}}
REFLECTED: Any = {"random_crop": {"size": 150, "padding": 40, "padding_mode": "reflect"}}


def moved(entries: list[Any], seed: int, source: Any = IMAGE) -> Picture:
    chain = Compose(build_by_name(entries, TRANSFORMS, key="augment.train"))
    return chain(Picture(source), random.Random(seed))


def matching_fraction(picture: Picture) -> float:
    """Return the fraction of image pixels that, moved as points, match their value in the mask."""
    points = np.floor(transform_target(np.argwhere(MASK)[:, ::-1] + 0.5, picture)).astype(int)
    inside = ((points >= 0) & (points < picture.size)).all(1)
    columns, rows = points[inside].T
    found = transform_target(MASK, picture)[rows, columns]
    return float((found == MASK.ravel()[inside])[found > 0].mean())  # 0 is cropped and filled


@pytest.mark.parametrize(
    "entries", [[CROP, FLIP, {"center_crop": {"size": 160}}], [FLIP, CROP], [FLIP, REFLECTED]]
)
def test_transform_target_moves_mask_exactly(entries):
    for seed in range(8):
        picture = moved(entries, seed)
        assert (picture.pixels()[..., 0] == transform_target(MASK, picture) * 100).all()
        assert matching_fraction(picture) == 1


@pytest.mark.parametrize(
    "entries",
    [
        [{"random_resized_crop": {"size": 120}}, FLIP],
        [{"resize": {"size": 100}}, {"center_crop": {"size": 90}}],
        [{"resize": {"size": [90, 160]}}, CROP, FLIP],
    ],
)
def test_transform_target_with_resized_images(entries):
    """Pixels near an edge have a color between the two values."""
    for seed in range(4):
        picture = moved(entries, seed)
        mask, colors = transform_target(MASK, picture) * 100, picture.pixels()[..., 0].astype(int)
        assert np.median(abs(colors - mask)) < 5, seed
        assert (abs(colors - mask) > 50).mean() < 0.05, seed
        assert (abs(colors - mask[::-1]) > 50).mean() > 0.2  # the test can tell the difference
        assert matching_fraction(picture) > 0.97, seed


def test_transform_target_rejects_rotation():
    """A rotation by torchvision, even before other steps, or by the EXIF orientation."""
    data = encoded(Image.fromarray(IMAGE), exif=exif(3))
    transform_target(MASK, open_picture(data, "pillow").mirrored())
    turned = open_picture(data, "pillow", exif_orientation=True).mirrored()
    for picture in (moved([{"v2.RandomRotation": {"degrees": 30}}, FLIP], 3), turned):
        with pytest.raises(ValueError, match=r"^a mask follows crops, .* orientation once"):
            transform_target(MASK, picture)


@pytest.mark.parametrize(
    "mask", [MASK.astype(np.uint8), MASK.astype(np.float32), np.stack([MASK, MASK + 5], axis=-1)]
)
def test_transform_target_without_decoding(mask):
    file = JpegFile(b"", (155, 140), lambda *_: pytest.fail("the file was decoded"))
    for seed in range(6):
        pictures = [moved([CROP, FLIP], seed, source) for source in (file, IMAGE)]
        ours, theirs = (transform_target(mask, picture, fill=9) for picture in pictures)
        np.testing.assert_array_equal(ours, theirs)
        assert (ours.dtype, ours.shape) == (mask.dtype, (150, 150, *mask.shape[2:]))
        assert set(np.unique(ours)) == {*np.unique(mask).tolist(), 9}
    size = r"is \(155, 140\), its image's is \(156, 140\); return points as float \[N, 2\]"
    with pytest.raises(ValueError, match=size):
        transform_target(mask, Picture(np.zeros((140, 156, 3), np.uint8)).cropped((0, 0, 9, 9)))
