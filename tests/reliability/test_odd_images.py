"""Odd image files are trained or named in one line, with Pillow's pixels."""

import io

import numpy as np
import pytest
from PIL import Image

from pipeline.data import decode
from tests.pipeline.loaders import SIZE, crops
from tests.reliability.odd_images import KINDS, drawn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # workers ignore them


@pytest.fixture(autouse=True)
def _fill_new_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new arrays, so that pixels skipped by a decoder differ."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **_: np.full(shape, 171, dtype))


def pillow_pixels(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        if image.format == "TIFF" and image.getexif().get(0x0112, 1) != 1:
            return np.asarray(drawn())  # Pillow would rotate it
        if image.mode.startswith("I;16"):  # Pillow would clip it to 8 bits
            return np.stack([np.asarray(image) >> 8] * 3, axis=-1)
        return np.asarray(image.convert("RGB"))


def test_decoders_train_or_name_every_file_kind(tmp_path):
    """With every CPU decoder; all files are named .jpg."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    files = [make() for make, _ in KINDS.values()]
    for number, content in enumerate(files):
        (tmp_path / "train" / "a" / f"{number:03d}.jpg").write_bytes(content)
    dataset, wrong = crops(tmp_path / "train"), {}
    for number, (kind, (_, verdict)) in enumerate(KINDS.items()):
        for dataset.decoder in ("pillow", decode.resolve("auto")):
            try:
                assert dataset[number]["image"].shape == (SIZE, SIZE, 3)
                picture = decode.open_picture(files[number], dataset.decoder)
                whole = picture.pixels()
                right = picture.size == whole.shape[1::-1] == verdict and whole.dtype == np.uint8
                right &= np.array_equal(whole, pillow_pixels(files[number]))
                found = f"trained with {whole.shape}"
            except decode.UnreadableError as error:
                found = str(error)
                named = f"{number:03d}.jpg: " in found and "\n" not in found
                right = named and isinstance(verdict, str) and verdict in found
            if not right:
                wrong[kind] = f"{dataset.decoder}: {found}"
    assert not wrong
