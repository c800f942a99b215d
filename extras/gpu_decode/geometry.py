"""Convert the geometry that a worker samples to numbers for the crop kernel.

The transforms and their random numbers are the same as on the CPU path.
"""

import numpy as np

from pipeline.data.decode import BASELINE, SKIPPED, START_OF_SCAN, JpegFile, Picture, segments

# Columns of a slot's geometry, float64 [B, COLUMNS]; integers below 2**53 are exact.
# The row's file, OFFSET bytes after the first one; LENGTH is 0 if the row contains pixels.
LENGTH, OFFSET, WIDTH, HEIGHT = 0, 1, 2, 3
# Source pixels that the kernel may read.
CLIP_LEFT, CLIP_TOP, CLIP_RIGHT, CLIP_BOTTOM = 4, 5, 6, 7
# Source point = SOURCE + SCALE * (target pixel + 0.5).
SOURCE_LEFT, SOURCE_TOP, SCALE_X, SCALE_Y = 8, 9, 10, 11
MIRRORED = 12
# Source pixels on the device; filled in by the training process.
ADDRESS, PITCH = 13, 14
BICUBIC = 15  # 0 for bilinear
COLUMNS = 16

# Second bytes of JPEG markers. ADOBE may state that the components are red, green and blue.
QUANTIZATION, ADOBE = 0xDB, 0xEE
# Component IDs and sampling factors in hex: YCbCr as 4:4:4, 4:2:2, 4:2:0 and 4:4:0.
SUPPORTED = ("010203111111", "010203211111", "010203221111", "010203121111")


def write_geometry(picture: Picture, row: np.ndarray) -> bool:
    """Write CLIP, SOURCE, SCALE, MIRRORED and BICUBIC into a row, float64 [COLUMNS].

    Returns False if the kernel cannot produce this picture, because the transforms needed pixels,
    resized twice, or cropped a region outside the image.
    """
    if not isinstance(picture.source, JpegFile):
        return False
    width, height = picture.source.size
    start_x = start_y = 0.0
    scale_x = scale_y = 1.0
    clip = 0.0, 0.0, float(width), float(height)
    bicubic = mirrored = False
    for step in picture.geometry:
        left, top, right, bottom = step.box
        if min(left, top, width - right, height - bottom) < 0:
            return False  # black borders
        is_resized = step.size != (right - left, bottom - top)
        if is_resized and ((scale_x, scale_y) != (1.0, 1.0) or mirrored):
            return False  # two resizes differ from a single one
        if mirrored:
            left = width - right
        x = start_x + scale_x * left
        y = start_y + scale_y * top
        width, height = step.size
        if is_resized:
            clip = x, y, start_x + right, start_y + bottom
            bicubic = step.interpolation == "bicubic"
            scale_x = (right - left) / width
            scale_y = (bottom - top) / height
        start_x, start_y = x, y
        mirrored ^= step.mirrored
    row[CLIP_LEFT : CLIP_BOTTOM + 1] = clip
    row[SOURCE_LEFT : SCALE_Y + 1] = start_x, start_y, scale_x, scale_y
    row[MIRRORED] = mirrored
    row[BICUBIC] = bicubic
    return True


def engines_support(data: bytes) -> bool:
    """Whether the JPEG engines support a color JPEG: baseline, one scan, and common segments.

    The engines do not report a truncated file, so the end marker must be in the last 64 bytes.
    """
    frames = 0
    for marker, at, end in segments(data):
        if marker == START_OF_SCAN:
            in_one_scan = end - at == 14 and data[at + 4] == 3
            return frames == 1 and in_one_scan and b"\xff\xd9" in data[-64:]
        if not _is_supported(marker, data[at:end]):
            return False
        if marker == BASELINE:
            frames += 1
    return False


def _is_supported(marker: int, segment: bytes) -> bool:
    """Whether the engines support a segment before the scan; it begins with its marker."""
    if marker == BASELINE:
        return (segment[10:17:3] + segment[11:18:3]).hex() in SUPPORTED
    if marker == QUANTIZATION:  # complete 8-bit tables with IDs 0 to 3
        return len(segment) % 65 == 4 and max(segment[4::65], default=0) < 4
    if marker == ADOBE:
        return segment[15:16] != b"\0"
    return marker in SKIPPED
