"""Pictures: values are drawn in the right cell, bar and place."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from engine.log.pictures import (
    BLUE,
    RED,
    bars,
    confusion,
    encoded,
    grid,
    most_confused,
    per_class,
    worst,
)

STRANGE = [
    "plain",
    "a name far longer than any picture has room for " * 3,
    "ねこ",
    "\udcff\udcfe",
    "",
    "a\nb",
]


def colours(image: Image.Image) -> dict[tuple[int, int, int], int]:
    """Return colour -> number of pixels."""
    found, counts = np.unique(np.asarray(image).reshape(-1, 3), axis=0, return_counts=True)
    return {(int(r), int(g), int(b)): int(n) for (r, g, b), n in zip(found, counts, strict=True)}


def lengths(image: Image.Image, colour: str) -> list[int]:
    """Return the number of pixels of a colour in each block of rows that contains it."""
    rows = (np.asarray(image) == ImageColor.getrgb(colour)).all(2).sum(1)
    return [int(rows[y]) for y in range(1, len(rows)) if rows[y] and not rows[y - 1]]


def test_grid() -> None:
    for count, shape in {
        1: (3, 5, 5),
        7: (3, 5, 35),
        8: (3, 5, 40),
        9: (3, 10, 40),
        64: (3, 40, 40),
    }.items():
        images = torch.randint(1, 256, (count, 3, 5, 5), dtype=torch.uint8)
        sheet = grid(images)
        assert (sheet.shape, sheet.dtype) == (shape, torch.uint8)
        for i in range(count):
            row, column = divmod(i, 8)
            assert torch.equal(
                sheet[:, 5 * row : 5 * row + 5, 5 * column : 5 * column + 5], images[i]
            )
    assert grid(torch.ones(9, 3, 5, 5, dtype=torch.uint8))[:, 5:, 5:].sum() == 0


def test_bars() -> None:
    rows = [("a", 50.0, "50 %"), ("b", 100.0, "100 %"), ("c", 0.0, "none")]
    image = bars("title", rows, marked=["b"])
    a, c = lengths(image, BLUE)
    (b,) = lengths(image, RED)
    assert 2 * a == pytest.approx(b, abs=2) and c <= 3
    (half,) = lengths(bars("title", rows[:1], most=100, height=26), BLUE)
    assert half == pytest.approx(a, abs=1)
    assert bars("nothing", []).width == 900


def test_worst_shows_every_image_in_its_place() -> None:
    pixels = torch.zeros(6, 3, 20, 20, dtype=torch.uint8)
    for i in range(6):
        pixels[i] = 40 * i + 7
    sheet = np.asarray(worst("title", pixels, [(name, "plain", "loss 1.00") for name in STRANGE]))
    assert sheet.shape[1] == 8 + 4 * 168  # 20 px are enlarged to 160
    for i in range(6):
        x, y = 8 + i % 4 * 168, 40 + i // 4 * 222
        assert (sheet[y : y + 160, x : x + 160] == 40 * i + 7).all()
        assert (sheet[y + 160, x : x + 160] == 255).all()
    red = np.array(ImageColor.getrgb(RED))
    assert not (sheet[200:262, 8:168] == red).all(2).any()  # correct prediction
    assert (sheet[200:262, 176:336] == red).all(2).any()


@pytest.mark.parametrize(
    ("side", "tile"), [(32, 160), (64, 192), (160, 160), (224, 224), (384, 256)]
)
def test_worst_of_any_size(side: int, tile: int) -> None:
    image = worst("title", torch.zeros(1, 3, side, side, dtype=torch.uint8), [("a", "b", "c")])
    assert colours(image)[0, 0, 0] >= tile * tile and image.height == 40 + tile + 62


def cell(image: Image.Image, row: int, column: int, count: int) -> tuple[int, ...]:
    """Return the colour of a cell of a confusion matrix, at its edge, away from the number."""
    pixels = np.asarray(image)
    side = max(22, min(64, 640 // count))
    grey = (pixels == 128).all(2)
    top = int(np.argmax(grey.sum(1) > count * side)) + 1  # the frame
    left = int(np.argmax(grey.sum(0) > count * side)) + 1
    return tuple(pixels[top + row * side + 1, left + column * side + 1].tolist())


def test_confusion() -> None:
    table = np.array([[8, 2, 0], [0, 10, 0], [10, 0, 0]])
    image = confusion("title", table, ["a", "b", "c"])
    found = [[cell(image, row, column, 3) for column in range(3)] for row in range(3)]
    white = (255, 255, 255)
    assert {found[0][2], found[1][0], found[1][2], found[2][1], found[2][2]} == {white}
    assert found[2][0] == ImageColor.getrgb(RED)  # all of c are predicted as a
    assert all(blue[2] > blue[0] for blue in (found[0][0], found[1][1]))  # blue is correct
    assert found[1][1][0] < found[0][0][0]  # darker is more
    assert found[0][1][0] > found[0][1][1] > found[2][0][1]


@pytest.mark.parametrize("classes", [1, 2, 10, 50, 51, 300])
def test_confusion_of_any_number_of_classes(classes: int) -> None:
    rng = np.random.default_rng(classes)
    table = rng.integers(0, 3, (classes, classes))
    table[0] = 0  # no images
    image = confusion("title", table, [f"n{i:08d}" for i in range(classes)])
    assert image.width <= 1400 and image.height <= 1400
    confusion("title", np.zeros((classes, classes), dtype=np.int32), ["x"] * classes)


def test_names_that_are_not_text() -> None:
    table = np.ones((6, 6), dtype=np.int32)
    for image in (
        confusion("title", table, STRANGE),
        per_class("title", table.sum(1), table.diagonal(), STRANGE),
    ):
        assert image.width < 1000


def test_most_confused_classes() -> None:
    table = np.zeros((100, 100), dtype=np.int32)
    np.fill_diagonal(table, 50)
    for count, (a, b) in {30: (70, 5), 20: (9, 70), 10: (40, 41), 3: (1, 2), 1: (3, 4)}.items():
        table[a, b] = count
    table[41, 40] = 15
    assert most_confused(table, 4) == [5, 70, 40, 41]  # sum of both directions: 30, and 15 + 10
    assert most_confused(table, 50) == [5, 70, 40, 41, 9, 1, 2, 3, 4]
    assert most_confused(np.eye(100, dtype=np.int32), 50) == list(range(50))  # nothing is confused


def test_per_class() -> None:
    images = np.array([10, 0, 10, 20])
    image = per_class("title", images, np.array([9, 0, 2, 10]), ["a", "never seen", "c", "d"])
    c, d, a = lengths(image, BLUE)  # worst first
    assert 4.5 * c == pytest.approx(a, rel=0.02) and 2.5 * c == pytest.approx(d, rel=0.02)


def test_per_class_of_many() -> None:
    count = 1000
    hits = np.random.default_rng(0).permutation(count) % 101
    image = per_class("title", np.full(count, 100), hits, [f"n{i:08d}" for i in range(count)])
    assert len(lengths(image, RED)) == 20 and image.width == 900
    assert (
        per_class(
            "title", np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64), ["a", "b", "c"]
        ).width
        == 900
    )


@pytest.mark.parametrize(("side", "kind"), [(32, "PNG"), (64, "JPEG")])
def test_encoded(side: int, kind: str) -> None:
    """64 CIFAR images and drawings are lossless; Tiny ImageNet images as PNG would take 500 kB."""
    small = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    )
    sheet = small.resize((8 * side, 8 * side))  # no sharper than a photograph
    for photos in (False, True):
        back = Image.open(io.BytesIO(encoded(sheet, photos=photos)))
        assert (back.format, back.size) == (kind if photos else "PNG", sheet.size)
        difference = np.abs(np.asarray(back).astype(int) - np.asarray(sheet)).mean()
        assert difference == 0 if back.format == "PNG" else difference < 5
