"""The prefetcher's upload for `loader.decoder=gpu` and `hybrid`: the GPU decodes the rows."""

import logging

import torch
from torch import Tensor

from pipeline.gpu_decode.decoder import EngineError, GpuDecoder
from pipeline.loader import HostBatch, Loader
from pipeline.prefetcher import DeviceSlot

logger = logging.getLogger(__name__)

FIRST_SHARE = 0.6  # share of a hybrid batch for the JPEG engines until the rates are known


class EngineUpload:
    """Decodes the encoded rows of a batch on the GPU. Calls block on the host, without the GIL.

    Args:
        loader: its source has `encoded` buffers.
        decoder: for batches of this size.
        hybrid: split each batch between workers and engines by their measured rates.
    """

    def __init__(self, loader: Loader, decoder: GpuDecoder, *, hybrid: bool = False) -> None:
        rows = loader.pool.sources[loader.source].encoded
        assert rows is not None, "the source has no buffers for files"
        self.loader = loader
        self.decoder = decoder
        self.rows = rows
        self.hybrid = hybrid
        loader.encoded_share = FIRST_SHARE if hybrid else 1.0

    def __call__(self, host: HostBatch, slot: DeviceSlot, mixed: bool) -> Tensor:
        """Make normalised images [B, 3, S, S] on the device.

        Raises:
            LoaderError: an image cannot be read; names it.
        """
        image = slot.format
        if mixed:  # the transforms compute in float32, as after a CPU decoder, and make new images
            out = torch.empty(
                host.images.shape, device=image.device, memory_format=image.memory_format
            )
        else:  # the kernel writes the images that the step reads
            out = slot.memory("images", host.images.shape, image.dtype)
        files = self.rows.files.array[host.slot]
        geometry = torch.from_numpy(self.rows.geometry.array[host.slot])
        pixels = host.images.permute(0, 2, 3, 1)
        scale, shift = image.scale.flatten(), image.shift.flatten()
        try:
            self.decoder.make_batch(files, geometry, pixels, out, scale, shift)
        except EngineError as error:
            logger.warning("%s: the CPU decoder decodes this batch instead", error)
            self.loader.load_in_process(host)
            self.decoder.make_batch(files, geometry, pixels, out, scale, shift)
        if self.hybrid:
            self._balance()
        return out

    def _balance(self) -> None:
        """Give the engines the share of a batch with which they and the workers finish together."""
        pool = self.loader.pool
        worker_seconds = pool.decode_seconds[self.loader.source]
        engine_seconds = self.decoder.seconds_per_image
        if worker_seconds.count and engine_seconds:
            engines = 1 / engine_seconds
            workers = max(1, len(pool.workers)) / max(worker_seconds.value, 1e-9)
            self.loader.encoded_share = engines / (engines + workers)
