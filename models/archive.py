"""Read an untrusted file of torch.save: no code in it runs, and memory and time are limited.

`torch.load(weights_only=True)` runs no code. But a file of a few kB can make it allocate 10 GB (a
call of bytearray), work for hours or crash the process (a dictionary key of 500,000 nested tuples
overflows the stack). So the file is checked before torch reads it, and the result afterwards.
"""

import argparse
import io
import os
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from conf.files import open_regular

# Limits of a pickle, the part of a file without the numbers of the tensors. That of a ResNet-50
# with its average and momentum has 26,000 instructions in 80 kB. At these limits, a hostile one
# takes 400 MB and 10 s.
MOST_BYTES = 32 << 20
MOST_INSTRUCTIONS = 1_000_000
DEEPEST = 100  # nested containers
LEGACY_PICKLES = 5  # at the beginning of a file of the format before zip
NAMED = 3  # names to list in a message

# Instructions of the pickle machine by the number of values that they take; None: to the last mark.
TAKES = {
    "TUPLE": None,
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "APPEND": 1,
    "APPENDS": None,
    "SETITEM": 2,
    "SETITEMS": None,
    "BUILD": 1,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "BINPERSID": 1,
    "STOP": 1,
}
EXTENDS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")  # the value below those
PUTS, GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")


def read_archive(path: Path) -> Any:
    """Read a file of torch.save to the CPU.

    Returns:
        Containers, numbers, texts, and dense tensors that are no larger than their data.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is something else, or would run code or exceed the limits; one line.
    """
    with open_regular(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        try:
            _check_zip(file) if is_zip else _check_legacy(file)
        except (OSError, ValueError):
            raise
        except Exception as error:  # zipfile raises many types too
            raise ValueError(f"damaged, or not by torch.save: {type(error).__name__}") from None
    try:
        # timm and torchvision store their arguments. A Namespace only holds attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load raises many types, with texts of many lines
        raise ValueError(_reason(path, error)) from None
    _check_content(content)
    return content


def _reason(path: Path, error: Exception) -> str:
    """Describe an error of torch.load in a few words."""
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # not a zip file
        needed = []
    needed = sorted(name for name in needed if name != "argparse.Namespace")
    return f"it would import {', '.join(needed[:NAMED])}" if needed else type(error).__name__


def _check_zip(file: BinaryIO) -> None:
    """Check the records of a zip file. torch.save neither compresses nor shares their bytes.

    Raises:
        ValueError: they are larger than the file, or the pickle exceeds the limits.
        Exception: it is no zip file of torch.save.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        size = os.fstat(file.fileno()).st_size
        if sum(record.file_size for record in records) > size:
            raise ValueError("its records are larger than the file: it is compressed or hostile")
        if min((record.header_offset for record in records), default=0) != 0:
            raise ValueError("damaged, or not by torch.save: bytes in front of the records")
        # torch ignores the case of names, and takes the folder of the first one.
        if len({record.filename.lower() for record in records}) < len(records):
            raise ValueError("two of its records have the same name")
        folder = records[0].filename.split("/")[0]
        if f"{folder}/constants.pkl" in archive.namelist():
            raise ValueError("it is a TorchScript program")
        program = archive.getinfo(f"{folder}/data.pkl")
        if program.file_size > MOST_BYTES:
            raise ValueError(f"its pickle is larger than {MOST_BYTES >> 20} MiB")
        _check_pickle(io.BytesIO(archive.read(program)))


def _check_legacy(file: BinaryIO) -> None:
    """Check the pickles of the format before zip, which the numbers of the tensors follow.

    Raises:
        ValueError: they exceed the limits, or there are none.
    """
    head = io.BytesIO(file.read(MOST_BYTES))
    for _ in range(LEGACY_PICKLES):
        _check_pickle(head)


@dataclass(slots=True)
class _Value:
    """What a pickle has built, as far as the limits need it.

    Attributes:
        items: number of items, with those of tuples in it.
        depth: number of nested tuples.
        parts: of a tuple.
        text: of a text, or the name of a function.
    """

    items: int = 1
    depth: int = 0
    parts: "tuple[_Value, ...]" = ()
    text: str = ""


def _check_pickle(file: BinaryIO) -> None:
    """Follow the instructions of a pickle without executing them.

    A pickle builds what it contains, so it costs about as much as its instructions. Only a call, or
    the state of an object, may be given the same large value again and again.

    Raises:
        ValueError: it is no pickle, or exceeds the limits.
        KeyError, IndexError: it is damaged.
    """
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[Any, _Value] = {}
    given = 0  # items that calls take
    for count, (instruction, argument, _) in enumerate(pickletools.genops(file)):
        name = instruction.name
        if count > MOST_INSTRUCTIONS or given > MOST_INSTRUCTIONS:
            raise ValueError(f"its pickle takes more than {MOST_INSTRUCTIONS:,} steps")
        if name == "MARK":
            marks.append(len(stack))
        elif name in PUTS:
            memo[argument] = stack[-1]
        elif name in GETS:
            stack.append(memo[argument])
        elif name in TAKES:
            takes = TAKES[name]
            begin = marks.pop() if takes is None else len(stack) - takes
            parts = stack[begin:]
            del stack[begin:]
            given += _given(name, parts)
            if name in EXTENDS:
                stack[-1].items += len(parts)
            else:
                stack.append(_made(name, parts))
        elif name != "PROTO":
            stack.append(_Value(text=argument if isinstance(argument, str) else ""))


def _given(name: str, parts: list[_Value]) -> int:
    """Return the number of items that an instruction gives to a function or to an object.

    Raises:
        ValueError: the function is one whose cost does not follow from them.
    """
    if name == "REDUCE":
        function, arguments = parts
        if function.text in ("builtins bytearray", "__builtin__ bytearray"):
            raise ValueError("it would call bytearray")
        if function.text == "_codecs encode":
            codec = arguments.parts[-1].text
            if codec not in ("latin1", "latin-1"):  # as pickle writes bytes
                raise ValueError("it would call a codec")
            return len(arguments.parts[0].text)
    return sum(part.items for part in parts) if name in ("REDUCE", "NEWOBJ", "BUILD") else 0


def _made(name: str, parts: list[_Value]) -> _Value:
    """Return the tuple, or the result of a call."""
    depth = max((part.depth for part in parts), default=0) + name.startswith("TUPLE")
    if depth > DEEPEST:
        raise ValueError(f"its containers are nested more than {DEEPEST} deep")
    if not name.startswith("TUPLE"):
        return _Value(depth=depth)
    return _Value(1 + sum(part.items for part in parts), depth, tuple(parts))


def _check_content(content: Any) -> None:
    """Check what torch has read. An object may be in many places, and in itself.

    Raises:
        ValueError: it is too large or too deep to look at, or a tensor is not plain.
    """
    waiting: list[tuple[Any, int]] = [(content, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        items: Any = ()
        if isinstance(value, dict):
            items = [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            items = value
        elif isinstance(value, argparse.Namespace):
            items = vars(value).values()
        elif isinstance(value, Tensor):
            _check_tensor(value)
        count += len(items)
        if count > MOST_INSTRUCTIONS or depth > DEEPEST:
            raise ValueError("its containers are too large, nested too deeply, or cyclic")
        waiting += [(item, depth + 1) for item in items]


def _check_tensor(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_quantized or tensor.is_meta:
        raise ValueError("a tensor is not an ordinary dense tensor")
    if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError("a tensor is larger than its data")
