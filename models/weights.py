"""Weights from files: this project's checkpoints, and files of torchvision, timm and others.

Reading a file never executes code from it.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from conf.files import open_regular
from conf.schema import UserError
from models.archive import read_archive
from models.stages import stages

logger = logging.getLogger(__name__)

Weights = dict[str, Tensor]
# Keys under which trainers store the state_dict. The moving average comes first: timm and
# torchvision report the accuracy of the average if there is one.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, AveragedModel and torch.compile
# Former names of layers in torchvision's files (DenseNet, ViT) -> names now.
RENAMED = (
    (r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2."),
    (r"\.mlp\.linear_1\.", ".mlp.0."),
    (r"\.mlp\.linear_2\.", ".mlp.3."),
)
NAMED = 3  # keys to name in a message
# Last part of the name of a position embedding, float [1, tokens, C] -> how its library resizes it:
# torchvision's interpolate_embeddings, timm's resample_abs_pos_embed.
POSITIONS: dict[str, dict[str, bool]] = {
    "pos_embedding": {"align_corners": True},
    "pos_embed": {"antialias": True},
}
# Bytes; that of a model has less than 1 MB. 100 MB, the limit of the package, can take 2 GB of RAM.
LONGEST_HEADER = 16 << 20
# The types of https://github.com/huggingface/safetensors (section "Format") that weights have.
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the initial weights of a training from any file that `read_file` reads.

    If the number of classes differs, or the file has no head, the head keeps its initial weights.
    Position embeddings of another image size are interpolated.

    Raises:
        UserError: the file is missing, cannot be read, or is of another model.
    """
    origin = f"model.weights={path}"
    weights = weights_in(read_file(path, origin=origin), origin=origin)
    fit_weights(model, weights, origin=origin, new_head=True)


def read_file(path: Path, *, origin: str) -> Any:
    """Read a file of torch.save or safetensors to the CPU.

    Args:
        path: a name that ends in .safetensors decides the format.
        origin: the beginning of error messages.

    Raises:
        UserError: the file is missing, or cannot be read without executing code from it.
    """
    if path.suffix in (".pt2", ".onnx"):
        raise UserError(
            f"{origin}: is an exported program; give the checkpoint or the run that it was "
            "exported from"
        )
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return read_archive(path)
    except FileNotFoundError:
        raise UserError(
            f"{origin}: no such file or folder; give a checkpoint, the folder of a run, or a file "
            "with weights (.pth, .pt, .safetensors)"
        ) from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(
            f"{origin}: cannot be read ({reason}); give a state_dict or a checkpoint"
        ) from None


def weights_in(content: Any, *, origin: str) -> Weights:
    """Return the state_dict in the content of a file, with the keys of the plain model.

    It is the content itself, or under one of CONTAINERS. Of a checkpoint of this project, it is the
    moving average if there is one, which is what a validation measures.

    Raises:
        UserError: there is no state_dict.
    """
    stored = content
    if isinstance(content, dict) and isinstance(content.get("state"), dict):
        averaged = content["state"].get("ema")
        stored = content["state"].get("model") if averaged is None else averaged
    elif isinstance(content, dict):
        inner = (content[name] for name in CONTAINERS if isinstance(content.get(name), dict))
        stored = next(inner, content)
    if not isinstance(stored, dict) or not stored:
        raise UserError(f"{origin}: is not a state_dict; give a state_dict or a checkpoint")
    weights = {name: value for name, value in stored.items() if name != "n_averaged"}
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in weights.items()):
        raise UserError(f"{origin}: is not a state_dict; give a state_dict or a checkpoint")
    return _without_prefixes(weights)


def stored_name(content: Any) -> str | None:
    """Return the name of the model that pytorch/examples, timm or torchvision store in a file."""
    name = content.get("arch") if isinstance(content, dict) else None
    if name is None and isinstance(content, dict):
        name = getattr(content.get("args"), "model", None)
    return name if isinstance(name, str) else None


def fit_weights(model: nn.Module, weights: Weights, *, origin: str, new_head: bool = False) -> None:
    """Load weights by name. The model does not change if they do not fit.

    Args:
        origin: the beginning of messages.
        new_head: they are the initial weights of a training. If the number of classes differs, or
            they have no head, the head keeps its own. Position embeddings of another image size are
            interpolated.

    Raises:
        UserError: keys are missing, unknown or of another shape: another model's weights.
    """
    own = model.state_dict()
    weights = {_current_name(name, own): value for name, value in weights.items()}
    if new_head:
        weights |= _resized_positions(weights, own)
    # The oldest weights of torchvision have no num_batches_tracked.
    missing = [k for k in own if k not in weights and not k.endswith("num_batches_tracked")]
    unknown = [k for k in weights if k not in own]
    other = [k for k in own if k in weights and own[k].shape != weights[k].shape]
    # The number of classes is the first dimension of the head's tensors.
    first = {(own[k].shape[:1], weights[k].shape[:1]) for k in other}
    only_head = set(other) <= set(_head(model)) and all(
        own[k].shape[1:] == weights[k].shape[1:] for k in other
    )
    if new_head and only_head and not unknown and (not missing or missing == _head(model)):
        if kept := missing or other:
            why = "the file has no head"
            for model_size, file_size in first:
                why = f"the file has {file_size[0]} classes, the data {model_size[0]}"
            logger.warning("%s: %s keep their initial weights: %s", origin, ", ".join(kept), why)
    elif missing or unknown or other:
        kinds = [f"{_named(missing)} missing"] if missing else []
        kinds += [f"{_named(unknown)} unknown"] if unknown else []
        kinds += [f"{_named(other)} of another shape"] if other else []
        names = "model.name and data.image_size" if other else "model.name"
        raise UserError(f"{origin}: does not fit the model: {'; '.join(kinds)}; check {names}")
    # `own` has the versions of the layers, which MNASNet requires.
    own.update({name: value for name, value in weights.items() if name not in other})
    model.load_state_dict(own)


def resize_positions(positions: Tensor, tokens: int, **options: bool) -> Tensor | None:
    """Interpolate the position embeddings of a square grid of patches; other tokens stay.

    Args:
        positions: float [1, N, C]: tokens such as the class token, then the patches row by row.
        tokens: N of the result, float [1, N, C].
        options: of torch's bicubic interpolation.

    Returns:
        None if both numbers are not the same number of tokens plus a square.
    """
    for others in range(min(positions.shape[1], tokens)):
        sides = [math.isqrt(n - others) for n in (positions.shape[1], tokens)]
        if [others + side**2 for side in sides] == [positions.shape[1], tokens]:
            grid = positions[:, others:].float().transpose(1, 2).unflatten(2, (sides[0], sides[0]))
            size = (sides[1], sides[1])
            grid = nn.functional.interpolate(grid, size=size, mode="bicubic", **options)
            patches = grid.flatten(2).transpose(1, 2).to(positions.dtype)
            return torch.cat([positions[:, :others], patches], dim=1)
    return None


def _resized_positions(weights: Weights, own: Mapping[str, Tensor]) -> Weights:
    """Return the position embeddings that have another number of tokens, for the model's."""
    resized: Weights = {}
    for name, value in weights.items():
        options = POSITIONS.get(name.rpartition(".")[2])
        if options is None or name not in own or value.ndim != 3 or own[name].ndim != 3:
            continue
        (_, tokens, width), same = own[name].shape, value.shape == own[name].shape
        if not same and (value.shape[0], value.shape[2]) == (1, width):
            found = resize_positions(value, tokens, **options)
            resized |= {} if found is None else {name: found}
    return resized


def _head(model: nn.Module) -> list[str]:
    """Return the names of the tensors of the classifier: timm states it, else the last layer."""
    parameters = dict(model.named_parameters())
    stated = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    if stated:
        layers = {stated} if isinstance(stated, str) else set(stated)
        return [name for name in parameters if name.rpartition(".")[0] in layers]
    last = stages(model)[-1].parameters
    layers = {name.rpartition(".")[0] for name in last if parameters[name].ndim > 1}
    return [name for name in last if name.rpartition(".")[0] in layers]


def write_safetensors(path: Path, weights: Weights, texts: Mapping[str, str]) -> None:
    """Write a safetensors file.

    Args:
        texts: its `__metadata__`.
    """
    names = {dtype: name for name, dtype in SAFETENSORS.items()}
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    end = 0
    for name, value in weights.items():
        place = [end, end + value.nbytes]
        end = place[1]
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": place,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers may map the tensors, which must be aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in weights.values():
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the `__metadata__` of a safetensors file.

    Raises:
        ValueError: the file is damaged.
    """
    with open_regular(path) as file:
        return dict(_safetensors_header(file).get("__metadata__", {}))


def file_fingerprint(path: Path) -> str:
    """Identify the content of a weights file, independent of its name.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            return f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"model.weights={path}: {reason}; give the path of the file, which every start reads, "
            "even if the run resumes"
        ) from None


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return f"{', '.join(keys[:NAMED])}{more} {'is' if len(keys) == 1 else 'are'}"


def _current_name(name: str, own: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor in the model, if the file has a former one."""
    if name in own:
        return name
    names = (re.sub(pattern, new, name) for pattern, new in RENAMED)
    return next((new for new in names if new in own), name)


def _without_prefixes(weights: Mapping[str, Tensor]) -> Weights:
    """Remove the prefixes that wrappers add to every key; torch.compile also adds them inside."""
    plain = dict(weights)
    while prefix := next(
        (p for p in PREFIXES if plain and all(k.startswith(p) for k in plain)), ""
    ):
        plain = {key.removeprefix(prefix): value for key, value in plain.items()}
    return {key.replace("_orig_mod.", ""): value for key, value in plain.items()}


def _read_safetensors(path: Path) -> Weights:
    """Read a safetensors file: the length of a JSON header, the header, and the raw tensors.

    Raises:
        ValueError: the file is damaged, or holds another type of numbers.
    """
    with open_regular(path) as file:
        header = _safetensors_header(file)
        data = memoryview(file.read())
    header.pop("__metadata__", None)
    weights: Weights = {}
    left = len(data)
    for name, entry in header.items():
        weights[name] = _tensor(name, entry, data)
        left -= weights[name].nbytes
        if left < 0:
            raise ValueError("its tensors overlap")
    return weights


def _safetensors_header(file: BinaryIO) -> dict[str, Any]:
    """Read the header; the tensors follow in the file."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(os.fstat(file.fileno()).st_size - 8, LONGEST_HEADER):
        raise ValueError("not a safetensors file")
    header = json.loads(file.read(length))
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError("not a safetensors file")
    return header


def _tensor(name: str, entry: Any, data: memoryview) -> Tensor:
    try:
        dtype, shape = SAFETENSORS[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= begin <= end <= len(data) or end - begin != size:
            raise ValueError("its size is wrong")
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]  # torch adds its stack
        raise ValueError(f"tensor {name}: {type(error).__name__}: {reason[:200]}") from None
