"""Calibrate class probabilities, softmax(logits / T), with a temperature T (arXiv 1706.04599).

evaluate.py fits T to a run's validation images and stores it beside the checkpoint, by fingerprint
of weights and preprocessing, so that predict.py and export.py use no other checkpoint's T.
"""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.files import json_text, write_json
from scripts.lib.trained import Trained

FILE = "temperatures.json"  # fingerprint -> T
BINS = 15  # bins of the expected calibration error


def fit_temperature(logits: Tensor, labels: Tensor, device: torch.device) -> float:
    """Return the T that minimizes the cross-entropy of logits / T, in float64 on a device.

    Labels are smoothed by 1 / (N + 2) like Platt's (1999), because T would be 0 if all predictions
    were correct. `logits`: [N, classes]; `labels`: int64 [N].
    """
    log_t = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_t], max_iter=100, line_search_fn="strong_wolfe")
    logits, labels = logits.to(device).double(), labels.to(device)
    smoothing = 1 / (len(labels) + 2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / log_t.exp(), labels, label_smoothing=smoothing)
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    return log_t.exp().item()


def calibration_error(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Return the expected calibration error in percent. See `fit_temperature` for the arguments."""
    confidence, prediction = (logits.double() / temperature).softmax(1).max(1)
    bins = (confidence * BINS).ceil().long()
    gaps = (prediction == labels).double() - confidence
    return (100 * bins.bincount(gaps).abs().sum() / len(labels)).item()


def is_cross_entropy(losses: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Return whether the images' losses, float [N], are the cross-entropy of these logits."""
    expected = F.cross_entropy(logits.float(), labels, reduction="none")
    return torch.allclose(losses.float(), expected, rtol=1e-3, atol=1e-4)


def calibrate(logits: Tensor, labels: Tensor, device: torch.device) -> dict[str, float]:
    """Return T, and the error on odd-numbered images without and with a T fitted to the others."""
    half = fit_temperature(logits[::2], labels[::2], device)
    odd = logits[1::2], labels[1::2]
    return {
        "temperature": fit_temperature(logits, labels, device),
        "ece_odd": calibration_error(*odd),
        "ece_odd_calibrated": calibration_error(*odd, half),
    }


def fingerprint(trained: Trained) -> str:
    """Return a digest of the weights and the preprocessing."""
    config = trained.config
    data = config.data
    settings = [data.mean, data.std, data.exif_orientation, config.augment.val]
    digest = hashlib.sha256(json_text(settings).encode())
    for name in sorted(trained.weights):
        digest.update(trained.weights[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_temperatures(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_bytes()))
    return {}


def store_temperature(trained: Trained, temperature: float) -> Path:
    """Add a checkpoint's T to the file beside it. Raises OSError if it cannot be written."""
    path = trained.path.with_name(FILE)
    write_json(path, read_temperatures(path) | {fingerprint(trained): temperature})
    return path


def calibrated(trained: Trained, chosen: float | None = None) -> Trained:
    """Set the temperature that is `chosen`, stored beside the checkpoint or in an exported file."""
    path = trained.path.with_name(FILE)
    stored = read_temperatures(path)
    if stored and chosen is None:
        chosen = stored.get(fingerprint(trained))
        if chosen is None:
            text = "%s: fitted to other weights or preprocessing, so not used; run evaluate.py %s"
            logging.warning(text, path, trained.path)
    temperature = chosen or trained.temperature
    if temperature != 1:
        logging.info("probabilities are softmax(logits / %.4g)", temperature)
    return replace(trained, temperature=temperature)
