"""The geometry that a worker draws, as numbers for the crop kernel: where each pixel is from.

Journey of a batch, 3 for `loader.decoder=gpu` and `hybrid`. The transforms and their random numbers
are those of the CPU path.
"""

import numpy as np

from pipeline.decode import (
    BASELINE,
    SKIPPED,
    START_OF_SCAN,
    Frame,
    JpegFile,
    Mirror,
    Picture,
    Resize,
    has_end,
)

# Columns of a slot's geometry, float64 [B, COLUMNS]; integers below 2**53 are exact.
# The file of the row; LENGTH 0: the row holds pixels.
LENGTH, OFFSET, WIDTH, HEIGHT = 0, 1, 2, 3
# Source pixels that may be read.
CLIP_LEFT, CLIP_TOP, CLIP_RIGHT, CLIP_BOTTOM = 4, 5, 6, 7
# Source point = SOURCE + SCALE * (target pixel + 0.5).
SOURCE_LEFT, SOURCE_TOP, SCALE_X, SCALE_Y = 8, 9, 10, 11
MIRRORED = 12
# Source pixels on the device; written by the training process.
ADDRESS, PITCH = 13, 14
BICUBIC = 15  # 0: bilinear
COLUMNS = 16

# Second bytes of JPEG markers. The last one may say that the components are red, green and blue.
QUANTISATION, ADOBE = 0xDB, 0xEE
# Sampling factors that hardware JPEG decoders support: 4:4:4, 4:2:2, 4:2:0 and 4:4:0.
CHROMA = {
    ((1, 1), (1, 1), (1, 1)),
    ((2, 1), (1, 1), (1, 1)),
    ((2, 2), (1, 1), (1, 1)),
    ((1, 2), (1, 1), (1, 1)),
}


def write_geometry(picture: Picture, row: np.ndarray) -> bool:
    """Write CLIP, SOURCE, SCALE, MIRRORED and BICUBIC into a row, float64 [COLUMNS].

    Returns:
        False if the kernel cannot make this picture: the transforms needed pixels, resized twice,
        or cropped a region outside the image.
    """
    if not isinstance(picture.source, JpegFile):
        return False
    width, height = picture.source.size
    clip, source, bicubic, mirrored = (0, 0, width, height), (0.0, 0.0, 1.0, 1.0), False, False
    for step in picture.steps:
        if isinstance(step, Mirror):
            mirrored = not mirrored
            continue
        left, top, right, bottom = step.box
        if isinstance(step, Resize):
            if source != (0.0, 0.0, 1.0, 1.0) or mirrored:
                return False  # two resizes are not equal to one
            width, height = step.size
            source = (left, top, (right - left) / width, (bottom - top) / height)
            clip, bicubic = step.box, step.interpolation == "bicubic"
        else:
            if left < 0 or top < 0 or right > width or bottom > height:
                return False  # black borders
            if mirrored:
                left, right = width - right, width - left
            x, y, scale_x, scale_y = source
            source = (x + scale_x * left, y + scale_y * top, scale_x, scale_y)
            width, height = right - left, bottom - top
    row[CLIP_LEFT : CLIP_BOTTOM + 1] = clip
    row[SOURCE_LEFT : SCALE_Y + 1] = source
    row[MIRRORED], row[BICUBIC] = mirrored, bicubic
    return True


def engines_support(data: bytes, frame: Frame) -> bool:
    """Whether the JPEG engines decode a file: baseline, in one scan, and of a usual kind.

    The engines do not report a truncated file, so this looks for its end marker.
    """
    if frame.marker != BASELINE or frame.sampling not in CHROMA or not has_end(data):
        return False
    at = 2
    while data.startswith(b"\xff", at):
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if marker == START_OF_SCAN:
            return length == 12 and data[at + 4] == 3
        if marker == BASELINE:
            usual = end == frame.end  # no second frame
        elif marker == QUANTISATION:  # whole tables of bytes, numbered 0 to 3
            usual = length % 65 == 2 and all(number < 4 for number in data[at + 4 : end : 65])
        elif marker == ADOBE:
            usual = data[at + 15] != 0
        else:
            usual = marker in SKIPPED
        if not usual or end >= len(data):
            return False
        at = end
    return False
