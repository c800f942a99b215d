"""Decode training images with the GPU's JPEG engines: loader.decoder=gpu, hybrid or auto.

A worker reads a file, samples its augmentation, and sends the file with its crop geometry instead
of pixels. decoder.py decodes the files of a batch and crops and resizes them in one kernel. The
engines support baseline YCbCr JPEGs; workers decode other files. The pixels differ slightly from
the CPU decoders' pixels, so the mode is part of a run's identity.
"""

import logging
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Config
from extras.gpu_decode import geometry as g
from extras.gpu_decode.decoder import GpuDecoder, JpegEngineError, engines_error
from extras.gpu_decode.geometry import engines_support, write_geometry
from pipeline.data.augment import Compose, name_of, sample_rng
from pipeline.data.dataset import FolderDataset, calls_stage
from pipeline.data.decode import JpegFile, Picture
from pipeline.data.device_stage import DeviceDecodeError, DeviceStage
from pipeline.data.field import IMAGE, Field, image_field
from pipeline.data.shared import SharedArray
from pipeline.feed.batch import DeviceSlot, channels_first

logger = logging.getLogger(__name__)

FILE, GEOMETRY = "file", "geometry"  # fields of a sample that the engines decode
CPU, HYBRID, GPU = MODES = ("cpu", "hybrid", "gpu")  # `auto` selects one of the first two
# Multiple of the mean file size for each row. The rows of a task pool their bytes, because 0.8 %
# of ImageNet's files exceed four times the mean, and a worker takes 5 ms to decode each of those.
ROOM, MIN_ROOM = 1.5, 1 << 15
INITIAL_FRACTION = 0.6  # fraction of a hybrid batch for the engines until the rates are known
MAX_FRACTION = 1 - 1 / 256  # workers decode a few images to time them
AVERAGED = 500  # maximum images over which a worker averages its time per image
MODE, FRACTION = range(2)  # shared by all processes: index in MODES, fraction the engines decode
SENT, DECODED = range(2)  # kinds of images; workers measure the seconds per image of each kind
NO_FILES = np.empty(0, np.uint8)


def engines(dataset: Any, config: Config, device: torch.device) -> DeviceStage:
    """Return a stage with the engines, or the dataset's current stage; see data.on_device.

    Raises UserError if loader.decoder requests the engines and they cannot be used.
    """
    decoder = config.loader.decoder
    if decoder == HYBRID and config.train.deterministic:
        problem = "splits each batch by measured speed, so results differ between runs"
        fix = "use a different decoder with train.deterministic=true"
        raise UserError("loader.decoder=hybrid", problem, fix)
    if decoder not in ("auto", GPU, HYBRID):
        return dataset.stage
    reason = engines_error(device) or _why_pixels_needed(dataset)
    if decoder == "auto" and config.train.deterministic:
        reason = "train.deterministic=true excludes them"
    if not reason:
        return JpegEngineStage(dataset)
    if decoder != "auto":
        problem = f"cannot use the GPU's JPEG engines: {reason}"
        raise UserError(f"loader.decoder={decoder}", problem, "set auto")
    if device.type == "cuda" and hasattr(dataset, "transform"):
        logger.info("loader.decoder=auto: the GPU's JPEG engines are not used: %s", reason)
    return dataset.stage


def _why_pixels_needed(dataset: Any) -> str:
    """Return why the dataset needs pixels for all images; "" if the engines can decode some."""
    if not calls_stage(dataset):
        return "the dataset creates the images itself"
    image = np.zeros((300, 400, 3), np.uint8)
    source = Picture(JpegFile(b"", (400, 300), lambda *_: image))
    row = np.zeros(g.COLUMNS)
    chain: list[Any] = []
    for transform in dataset.transform.transforms:
        chain.append(transform)
        pictures = [Compose(chain)(source, sample_rng(0, 0, trial)) for trial in range(8)]
        if not any(write_geometry(picture, row) for picture in pictures):
            return f"{name_of(transform)} in augment.train needs decoded pixels"
    return ""


class JpegEngineStage(DeviceStage):
    """Send some images from the workers to the engines, as files with their crop geometry.

    In hybrid mode, workers decode the largest fraction with which they and the engines reach
    `demand` images/s, leaving most of the GPU to the step. If both are too slow, they end together.
    """

    decode_modes = MODES

    def __init__(self, dataset: FolderDataset) -> None:
        self.following = dataset.stage  # receives the pixels from the engines and the workers
        self.size = dataset.transform.image_size
        self.room = max(MIN_ROOM, int(ROOM * dataset.mean_bytes()))
        self.fields = {
            **self.following.fields,
            IMAGE: image_field(self.size),  # pixels of images that workers decode
            FILE: Field(np.uint8, (self.room,)),
            GEOMETRY: Field(np.float64, (g.COLUMNS,)),
        }
        self.shared = SharedArray((2,), np.float64)
        self.seconds = SharedArray((2,), np.float64)
        self.counts = SharedArray((2,), np.float64)  # number of images in each mean
        self.engine: GpuDecoder | None = None
        self.engine_seconds = 0.0  # engine time per image in the newest batch
        self.set_decode_mode(CPU)
        self._decodes_all = False  # whether this process decodes all images in any mode
        # State for the rows that a worker fills: memory for the files, its free bytes, number of
        # files that may still be sent, and the time at which the worker began the next image.
        self._files = NO_FILES
        self._free = range(0)
        self._due = 0.0
        self._began = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "engine": None, "_files": NO_FILES}

    @property
    def decode_mode(self) -> str:
        return MODES[int(self.shared.array[MODE])]

    def set_decode_mode(self, mode: str, *, workers: int = 1, demand: float = math.inf) -> None:
        self.workers = workers
        self.demand = demand
        self.device_decodes = mode == GPU
        self.shared.array[MODE] = MODES.index(mode)
        self.shared.array[FRACTION] = {CPU: 0.0, GPU: 1.0, HYBRID: INITIAL_FRACTION}[mode]
        self._balance()

    def begin_rows(self, fields: Mapping[str, np.ndarray], rows: range) -> None:
        self.following.begin_rows(fields, rows)
        self._files = fields[FILE].reshape(-1)
        self._free = range(rows.start * self.room, rows.stop * self.room)
        # Send the first rows, so that rows with pixels are adjacent and need few copies.
        due = self._due % 1 + self.shared.array[FRACTION] * len(rows)
        self._due = 0.0 if self._decodes_all else due
        self._began = time.perf_counter()

    def draw(self, picture: Picture, rng: random.Random) -> tuple[Picture, dict[str, Any]]:
        return self.following.draw(picture, rng)

    def image_fields(self, picture: Picture) -> dict[str, Any]:
        fields = self._file_or_pixels(picture)
        seconds = self.seconds.array
        counts = self.counts.array
        kind = DECODED if IMAGE in fields else SENT
        counts[kind] = min(counts[kind] + 1, AVERAGED)
        elapsed = time.perf_counter() - self._began  # includes reading, and writing the last sample
        seconds[kind] += (elapsed - seconds[kind]) / counts[kind]
        self._began += elapsed
        return fields

    def _file_or_pixels(self, picture: Picture) -> dict[str, Any]:
        if self.decode_mode == CPU:
            return self.following.image_fields(picture)
        row = np.zeros(g.COLUMNS)
        if self._due >= 1 and self._send(picture, row):
            return {GEOMETRY: row}
        # LENGTH stays 0, because the row contains pixels of the final size.
        row[[g.CLIP_RIGHT, g.CLIP_BOTTOM]] = self.size
        row[[g.SCALE_X, g.SCALE_Y]] = 1
        return {**self.following.image_fields(picture), GEOMETRY: row}

    def _send(self, picture: Picture, row: np.ndarray) -> bool:
        """Write a file and its geometry if the engines support it; return whether they do."""
        source = picture.source
        # `image_fields` raises an error for a different size, which names the file.
        if not isinstance(source, JpegFile) or picture.size != (self.size, self.size):
            return False
        data = source.data
        free = self._free
        if len(data) > len(free) or not engines_support(data) or not write_geometry(picture, row):
            return False
        row[[g.LENGTH, g.OFFSET, g.WIDTH, g.HEIGHT]] = len(data), free.start, *source.size
        self._free = free[len(data) :]
        self._due -= 1
        self._files[free.start : self._free.start] = np.frombuffer(data, np.uint8)
        return True

    def on_device(self, fields: Mapping[str, Tensor], slot: DeviceSlot) -> dict[str, Tensor]:
        self._decodes_all = False
        if self.decode_mode == CPU:
            return self.following.on_device(fields, slot)
        affine = slot.format.affine(3)
        pixels = fields[IMAGE]
        if type(self.following).on_device is not DeviceStage.on_device:  # needs levels
            levels = slot.memory(IMAGE, pixels.shape, torch.uint8)
            self._decode(fields, channels_first(levels), affine)
            return self.following.on_device({**fields, IMAGE: levels}, slot)
        out = slot.images(IMAGE, channels_first(pixels).shape)
        self._decode(fields, out, affine)
        return {IMAGE: out}

    def _decode(self, fields: Mapping[str, Tensor], out: Tensor, affine: Tensor) -> None:
        """Decode and crop a batch, and set the engines' fraction of later batches."""
        try:
            if self.engine is None:
                self.engine = GpuDecoder(out.device, len(out))
            self.engine.make_batch(fields[FILE], fields[GEOMETRY], fields[IMAGE], out, affine)
            self.engine_seconds = self.engine.seconds_per_image
        except (JpegEngineError, torch.OutOfMemoryError) as error:
            logger.warning("%s; the CPU decodes this batch instead", error)
            self._decodes_all = True
            raise DeviceDecodeError(str(error)) from error
        self._balance()

    def _balance(self) -> None:
        """Set the hybrid fraction from the measured times of workers and engines.

        With fraction f, the workers take (f * sent + (1 - f) * decoded) / workers per image, and
        the engines take f * engine_seconds.
        """
        sent, decoded = self.seconds.array
        if self.decode_mode == HYBRID and decoded and self.engine_seconds:
            saved = max(1e-9, decoded - sent)
            equal = decoded / (self.workers * self.engine_seconds + saved)
            needed = max(0.0, (decoded - self.workers / self.demand) / saved)
            self.shared.array[FRACTION] = min(equal, needed, MAX_FRACTION)
