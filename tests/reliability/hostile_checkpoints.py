"""Files that someone may pass off as a checkpoint: containers, pickles and contents.

Each entry of FILES and CONTENTS makes one of them. FILES are no checkpoints at all, so no entry
point may take them. CONTENTS are real checkpoints with one thing changed, which a resume refuses.
"""

import copy
import io
import json
import os
import socket
import struct
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Content = dict[str, Any]
MANY = 1_500_000


def saved(content: Any, path: Path, **options: Any) -> None:
    torch.save(content, path, **options)


def archive(path: Path, members: dict[str, bytes], **options: Any) -> None:
    """Write a file as torch.save does; `members` replace or add records."""
    records = {"data.pkl": b"\x80\x02}.", "byteorder": b"little", "version": b"3\n", **members}
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, record in records.items():
            file.writestr(f"archive/{name}", record)


def pickled(program: bytes) -> Callable[[Content, Path], None]:
    """A checkpoint whose data.pkl is this program of the pickle machine."""
    return lambda _, path: archive(path, {"data.pkl": b"\x80\x02" + program + b"."})


def number(value: int) -> bytes:
    """The pickle opcode that pushes an integer."""
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def tensor(numel: int, shape: bytes, stride: bytes, offset: int = 0) -> bytes:
    """The pickle program of {"a": a tensor in data/0}."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(numel) + b"tQ"
    rebuilt += number(offset) + shape + stride + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}" + text("a") + rebuilt + b"s."


def one(value: int) -> bytes:
    return number(value) + b"\x85"


def zip_bomb(content: Content, path: Path) -> None:
    """4 MB that inflate to 4 GB: the pickle is one long text."""
    block, blocks = 1 << 20, 4000
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packer.compress(b"a" * block)
    packer.flush(zlib.Z_FULL_FLUSH)
    middle = packer.compress(b"a" * block) + packer.flush(zlib.Z_FULL_FLUSH)
    head = zlib.compressobj(9, zlib.DEFLATED, -15)
    size = block * blocks
    start = head.compress(b"\x80\x02X" + struct.pack("<I", size)) + head.flush(zlib.Z_FULL_FLUSH)
    tail = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = start + middle * blocks + tail.compress(b".") + tail.flush()
    deflated(path, data, size + 8)


def deflated(path: Path, data: bytes, size: int) -> None:
    """Write a zip file whose data.pkl is a deflated stream that states `size`."""
    archive(path, {"data.pkl": b""})
    with zipfile.ZipFile(path) as file:
        others = {i.filename: file.read(i) for i in file.infolist() if "data.pkl" not in i.filename}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        for name, record in others.items():
            file.writestr(name, record)
    raw = bytearray(buffer.getvalue())
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = raw.index(signature)
        raw[at + place : at + place + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        raw[at + place + 14 : at + place + 18] = struct.pack("<I", size)
    path.write_bytes(raw)


def overlapping(_: Content, path: Path) -> None:
    """2,000 names for the same 4 MB."""
    archive(path, {"data/0": bytes(4 << 20)})
    raw = path.read_bytes()
    end = raw.rindex(b"PK\x05\x06")
    count, size, start = struct.unpack("<HII", raw[end + 10 : end + 20])
    directory = raw[start:end]
    last = directory[directory.rindex(b"PK\x01\x02") :]
    copies = b"".join(
        last.replace(b"data/0", b"d%05d" % n if n > 9 else b"data/%d" % n) for n in range(2000)
    )
    numbers = struct.pack("<HHII", count + 2000, count + 2000, size + len(copies), start)
    path.write_bytes(raw[:start] + directory + copies + raw[end : end + 8] + numbers + b"\0\0")


def sparse(_: Content, path: Path) -> None:
    """A file of 1 TB with a tensor of this size, of which the disk holds a few kB."""
    size = 10**12
    archive(path, {"data.pkl": tensor(size // 4, one(size // 4), one(1))})
    with zipfile.ZipFile(path, "a") as file:
        info = zipfile.ZipInfo("archive/data/0")
        info.file_size = size
        with file.open(info, "w", force_zip64=True) as record:
            assert isinstance(record, io.IOBase)
            record._fileobj.seek(size, io.SEEK_CUR)  # type: ignore[attr-defined]
            record._file_size = record._compress_size = size  # type: ignore[attr-defined]


def fifo(_: Content, path: Path) -> None:
    os.mkfifo(path)


def unix_socket(_: Content, path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a path of a socket is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def tar(_: Content, path: Path) -> None:
    with tarfile.open(path, "w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            file.addfile(tarfile.TarInfo(name))


def legacy_list(_: Content, path: Path) -> None:
    """The format before zip: a pickle that is a list of many empty lists."""
    saved([], path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"]q\x00.", b"](" + b"]" * MANY + b"e."))


def legacy_storage(_: Content, path: Path) -> None:
    """The format before zip: a storage that states 10^12 numbers."""
    saved({"a": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"K\x04Nt", number(10**12) + b"Nt"))


def safetensors(header: Any, data: bytes = b"") -> Callable[[Content, Path], None]:
    """A .safetensors file; the header is encoded as JSON unless it is bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda _, path: _write(path, struct.pack("<Q", len(raw)) + raw + data)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sparse_safetensors(_: Content, path: Path) -> None:
    size = 10**12
    safetensors({"a": entry([size // 4], [0, size])})(_, path)
    os.truncate(path, path.stat().st_size + size)


# These take seconds to refuse.
LONG = ("1.5 million lists", "legacy list", "lists that share their items", "copies of a large set")
# Nothing here is a checkpoint or a file with weights.
FILES: dict[str, Callable[[Content, Path], None]] = {
    "fifo": fifo,
    "socket": unix_socket,
    "device": lambda _, path: path.symlink_to("/dev/zero"),
    "null device": lambda _, path: path.symlink_to("/dev/null"),
    "directory": lambda _, path: path.mkdir(),
    "link to itself": lambda _, path: path.symlink_to(path.name),
    "dangling link": lambda _, path: path.symlink_to("gone"),
    "empty": lambda _, path: _write(path, b""),
    "text": lambda _, path: _write(path, b"step: 5\n" * 1000),
    "YAML with a tag": lambda _, path: _write(path, b"!!python/object/apply:os.system ['true']\n"),
    "YAML with anchors": lambda _, path: _write(
        path, b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    ),
    "zeros": lambda _, path: _write(path, bytes(100_000)),
    "JPEG": lambda _, path: _write(path, b"\xff\xd8\xff\xe0" + bytes(1000)),
    "zip bomb": zip_bomb,
    "zip with a deflated version": lambda _, path: archive(
        path, {"version": bytes(1 << 24)}, compression=zipfile.ZIP_DEFLATED
    ),
    "overlapping records": overlapping,
    "sparse terabyte": sparse,
    "zip without a pickle": lambda _, path: archive(path, {"data.pkl": b""}),
    "zip of something else": lambda _, path: zipfile.ZipFile(path, "w").close(),
    "zip cut off": lambda content, path: (saved(content, path), os.truncate(path, 5000))[0],
    "TorchScript": lambda _, path: archive(path, {"constants.pkl": b"\x80\x02)."}),
    "tar": tar,
    "legacy list": legacy_list,
    "legacy storage": legacy_storage,
    "storage of 10^12": lambda _, path: archive(
        path, {"data.pkl": tensor(10**12, one(4), one(1)), "data/0": bytes(16)}
    ),
    "offset outside": lambda _, path: archive(
        path, {"data.pkl": tensor(4, one(4), one(1), 10**9), "data/0": bytes(16)}
    ),
    "negative stride": lambda _, path: archive(
        path, {"data.pkl": tensor(4, one(4), one(-1)), "data/0": bytes(16)}
    ),
    "stride 0": lambda _, path: archive(
        path, {"data.pkl": tensor(4, one(10**12), one(0)), "data/0": bytes(16)}
    ),
    "sparse tensor": lambda _, path: saved(
        {"a": torch.sparse_coo_tensor([[0]], [1.0], (10**12,))}, path
    ),
    "bytearray of 4 GB": pickled(b"c__builtin__\nbytearray\n" + number(4 * 10**9) + b"\x85R"),
    "slow codec": pickled(
        b"c_codecs\nencode\n" + text("é" * 200_000 + "a") + text("punycode") + b"\x86R"
    ),
    "1.5 million lists": pickled(b"](" + b"]" * MANY + b"e"),
    "deep lists": pickled(b"]" * 20_000 + b"a" * 19_999),
    "deep key": pickled(b"})" + b"\x85" * 500_000 + b"Ns"),
    "list that holds itself": pickled(b"]q\x00h\x00a"),
    "lists that share their items": pickled(
        b"]q\x00" + b"](" + b"](h\x00h\x00h\x00h\x00eq\x00" * 40 + b"e"
    ),
    "copies of a large set": pickled(
        b"(](" + b"".join(map(number, range(50_000))) + b"eq\x00\x85q\x01"
        b"c__builtin__\nset\nq\x02" + b"h\x02h\x01R" * 20_000 + b"t"
    ),
    "copies of a large dict": pickled(
        b"(}("
        + b"".join(text(str(n)) + b"N" for n in range(50_000))
        + b"uq\x00"
        + b"ccollections\nOrderedDict\n)Rh\x00b" * 20_000
        + b"t"
    ),
    "os.system": pickled(b"cos\nsystem\n" + text("true") + b"\x85R"),
    "__builtin__.eval": pickled(b"c__builtin__\neval\n" + text("1") + b"\x85R"),
    "unknown opcode": pickled(b"\xff"),
    "text that ends too early": pickled(b"X\xff\xff\xff\x7f"),
}
SAFETENSORS: dict[str, Callable[[Content, Path], None]] = {
    "no header": lambda _, path: _write(path, b"\0" * 4),
    "header of 10^15 bytes": lambda _, path: _write(path, struct.pack("<Q", 10**15) + b"{}"),
    "header of 60 MB": safetensors(b"[" + b"[]," * 20_000_000 + b"[]]"),
    "deep header": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "header is a list": safetensors([1, 2]),
    "number of 100,000 digits": safetensors(b'{"a": ' + b"9" * 100_000 + b"}"),
    "outside the file": safetensors({"a": entry([4], [0, 16])}),
    "negative offset": safetensors({"a": entry([4], [-16, 0])}, bytes(16)),
    "overlapping": safetensors(
        {f"a{n}": entry([1 << 20], [0, 1 << 22]) for n in range(500)}, bytes(1 << 22)
    ),
    "negative shape": safetensors({"a": entry([-2, -2], [0, 16])}, bytes(16)),
    "shape of 10^30 and 0": safetensors({"a": entry([10**30, 0], [0, 0])}),
    "text as shape": safetensors({"a": entry("44", [0, 16])}, bytes(16)),
    "unknown dtype": safetensors({"a": entry([4], [0, 16], "F99")}, bytes(16)),
    "list as dtype": safetensors({"a": entry([4], [0, 16], ["F32"])}, bytes(16)),
    "sparse terabyte": sparse_safetensors,
}


def put(*path: Any) -> Callable[[Content, Path], None]:
    """Set an item of the content: the names that lead to it, then its value."""
    *names, last, value = path

    def change(content: Content, to: Path) -> None:
        content = copy.deepcopy(content)
        target: Any = content
        for name in names:
            target = target[name]
        target[last] = value(target[last]) if callable(value) else value
        saved(content, to)

    return change


def drop(*path: Any) -> Callable[[Content, Path], None]:
    """Remove an item of the content."""
    *names, last = path

    def change(content: Content, to: Path) -> None:
        content = copy.deepcopy(content)
        target: Any = content
        for name in names:
            target = target[name]
        del target[last]
        saved(content, to)

    return change


def nested(levels: int) -> list[Any]:
    """Lists that share their items: few objects, 10^levels items."""
    value: list[Any] = ["lol"]
    for _ in range(levels):
        value = [value] * 10
    return value


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def other_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """The state of AdamW for the same parameters."""
    moments = {
        number: {
            "step": torch.tensor(5.0),
            "exp_avg": next(iter(values.values())),
            "exp_avg_sq": next(iter(values.values())),
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


def first_moment(change: Callable[[Any], Any]) -> Callable[[dict[int, Any]], dict[int, Any]]:
    """Change the first tensor of the optimiser's state."""

    def changed(states: dict[int, Any]) -> dict[int, Any]:
        name, value = next(iter(states[0].items()))
        return {**states, 0: {**states[0], name: change(value)}}

    return changed


WEIGHT = ("state", "model", "conv1.weight")
# A real checkpoint with one change. The model is resnet_tiny with a moving average and SGD.
CONTENTS: dict[str, Callable[[Content, Path], None]] = {
    **{f"no {name}": drop(name) for name in ("format", "step", "state", "identity", "config")},
    **{
        f"step {value!r}": put("step", value)
        for value in ("5", -1, 10**9, 2**80, True, 5.0, float("nan"), None, [5], 6)
    },
    **{
        f"step {value!r} in the state": put("state", "step", value)
        for value in ("5", -1, 10**9, True, 5.0, float("nan"), 6)
    },
    "format true": put("format", True),
    "format as text": put("format", "2"),
    "config as YAML": put("config", "!!python/object/apply:os.system ['true']"),
    "config that is shared": put("config", "data.mean", nested(5)),
    "identity that is shared": put("identity", "augment.train", nested(5)),
    "deep identity": put("identity", "augment.train", deep(200)),
    "identity with a line end": put("identity", "model.name", "a\nError: b\x1b[2J"),
    "identity with a key that is a number": put("identity", 5, 5),
    "identity with a tensor": put("identity", "model.name", torch.zeros(3)),
    "state is a list": put("state", [1]),
    **{
        f"no {name} in the state": drop("state", name)
        for name in ("model", "ema", "ema_steps", "optimizer", "best", "last", "spent", "history")
    },
    "no weights": put("state", "model", {}),
    "weights as a list": put("state", "model", [1]),
    "no first layer": drop(*WEIGHT),
    "layer unknown": put("state", "model", "conv9.weight", torch.zeros(1)),
    "layer as text": put(*WEIGHT, "weights"),
    "layer of another shape": put(*WEIGHT, torch.zeros(3)),
    "layer of another dtype": put(*WEIGHT, lambda v: v.to(torch.int64)),
    "complex layer": put(*WEIGHT, lambda v: v.to(torch.complex64)),
    "layer of stride 0": put(*WEIGHT, lambda v: torch.zeros(1).expand(v.shape)),
    "large layer of stride 0": put(*WEIGHT, torch.zeros(1).expand(10**12)),
    "average is empty": put("state", "ema", {}),
    "average is a tensor": put("state", "ema", torch.zeros(3)),
    "average without a layer": drop("state", "ema", "conv1.weight"),
    "updates of the average": put("state", "ema_steps", torch.zeros(3)),
    "updates as text": put("state", "ema_steps", "many"),
    "optimizer as text": put("state", "optimizer", "sgd"),
    "optimizer without groups": put("state", "optimizer", "param_groups", []),
    "optimizer with wrong groups": put(
        "state", "optimizer", "param_groups", lambda groups: [*groups, groups[0]]
    ),
    "optimizer with a short group": put(
        "state", "optimizer", "param_groups", 0, "params", lambda numbers: numbers[1:]
    ),
    "optimizer of another kind": put("state", "optimizer", other_optimizer),
    "momentum of another shape": put(
        "state", "optimizer", "state", first_moment(lambda v: torch.zeros(2))
    ),
    "momentum of another dtype": put(
        "state", "optimizer", "state", first_moment(lambda v: v.to(torch.int64))
    ),
    "momentum as text": put("state", "optimizer", "state", first_moment(lambda v: "fast")),
    "momentum of an unknown parameter": put("state", "optimizer", "state", 999, {}),
    "table of losses too short": put("state", "losses", "sums", lambda v: v[:3].clone()),
    "table of losses too long": put("state", "losses", "latest", lambda v: torch.cat([v, v])),
    "table of losses of floats": put("state", "losses", "sums", lambda v: v.float()),
    "losses as a list": put("state", "losses", [1, 2]),
    "best as a list": put("state", "best", [1]),
    "best without a step": put("state", "best", {"top1": 5.0}),
    "best with text": put("state", "best", lambda row: {**row, "top1": "high"}),
    "last as text": put("state", "last", "row"),
    "seconds as text": put("state", "spent", lambda spent: {**spent, "training": "1"}),
    "seconds as a tensor": put("state", "spent", {"training": torch.zeros(3)}),
    "origin as a number": put("state", "origin", 5),
    "history as text": put("state", "history", "none"),
    "history of numbers": put("state", "history", [1, 2]),
    "ordered": lambda content, path: saved(OrderedDict(content, step="x"), path),
}
