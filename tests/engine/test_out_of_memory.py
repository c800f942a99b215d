"""Out of GPU memory: one line with a batch size that fits, a memory snapshot, no second error."""

import errno
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.schema import Optim
from engine import out_of_memory
from engine.distributed import World
from engine.optim import build_optimizer
from engine.out_of_memory import GIB, activation_bytes, estimate, explain_oom, fixed_bytes
from engine.state import MovingAverage, TrainState

CUDA = torch.device("cuda", 0)


def world(size: int = 1, rank: int = 0, device: torch.device = CUDA) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size, device=device)


ALONE = world()


def out() -> torch.cuda.OutOfMemoryError:
    return torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB "
        "of which 1.00 GiB is free. "
        "Including non-PyTorch memory, this process has 79.00 GiB memory in use."
    )


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU of 80 GiB with the given memory statistics."""

    def full(*, peak: float, reserved: float, free: float, fraction: float = 1.0) -> None:
        stats = {
            "allocated_bytes.all.peak": int(peak * GIB),
            "reserved_bytes.all.current": int(reserved * GIB),
        }
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
        monkeypatch.setattr(
            torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot")
        )

    return full


def raised_in(call: Callable[[], Any]) -> BaseException:
    """Return the error with its traceback, as in an `except` block."""
    try:
        call()
    except torch.cuda.OutOfMemoryError as error:
        return error
    raise AssertionError("nothing was raised")


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise out()


def out_in_forward() -> None:
    raise out()


def out_in_backward() -> None:
    FullInBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()


def out_in_the_step() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: out_in_forward())
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "expected", "takes", "remedy"),
    [
        # 0.9 * 79 - 2 GiB hold 226; a multiple of 8: 224
        (out_in_backward, 0, "about 312", "{}=2 {} or loader.batch_size=224 should fit"),
        (out_in_the_step, 900, "about 312", "{}=2 {} or loader.batch_size=224 should fit"),
        # in the forward pass, at an unknown place: half
        (out_in_forward, 0, "over 312", "try {}=2 {} or loader.batch_size=128"),
        (out_in_forward, 200, "over 312", "try {}=2 {} or loader.batch_size=128"),
        (out_in_forward, 624, "about 624", "{}=4 {} or loader.batch_size=112 should fit"),
        (out_in_forward, 312, "about 312", "{}=2 {} or loader.batch_size=224 should fit"),
    ],
)
def test_batch_that_fits(
    full, tmp_path: Path, call, expected: int, takes: str, remedy: str
) -> None:
    """A step of 256 images failed, which took 78 + 2 - 2 GiB."""
    full(peak=78, reserved=78.5, free=0.5)
    line = explain_oom(
        raised_in(call),
        ALONE,
        folder=tmp_path,
        batch_size=256,
        static_bytes=2 * GIB,
        image_bytes=expected * 2**20,
    )
    advice = remedy.format("train.accumulate", "(keeps the batch and its learning rate)")
    assert "\n" not in line
    assert line.startswith(
        "loader.batch_size=256: out of memory on cuda:0 (2.00 GiB requested, 0.50 of 80.0 GiB free)"
    )
    assert f"an image takes {takes} MiB, the model 2.00 GiB: {advice}; " in line
    assert f"{tmp_path / 'oom-rank0.pickle'} (open it at https://pytorch.org/memory_viz)" in line
    assert [p.name for p in tmp_path.iterdir()] == ["oom-rank0.pickle"]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 224), (3, 672), (8, 1792)])
def test_several_ranks(full, tmp_path: Path, ranks: int, batch: int) -> None:
    full(peak=78, reserved=78.5, free=0.5)
    line = explain_oom(
        raised_in(out_in_backward),
        world(ranks, rank=ranks - 1),
        folder=tmp_path,
        batch_size=256 * ranks,
        static_bytes=2 * GIB,
    )
    assert f"loader.batch_size={batch} should fit" in line
    assert (tmp_path / f"oom-rank{ranks - 1}.pickle").exists()


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "remedy"),
    [
        (512, 2, "train.accumulate=4 .* or loader.batch_size=448 should fit"),  # 256 at a time
        (1280, 5, "train.accumulate=8 .* or loader.batch_size=1120 should fit"),  # 160 at a time
        (257, 1, "GiB: loader.batch_size=224 should fit"),  # a prime number
    ],
)
def test_more_micro_batches(full, batch_size: int, accumulate: int, remedy: str) -> None:
    """As in test_batch_that_fits, about 224 images fit at a time."""
    full(peak=78, reserved=78.5, free=0.5)
    line = explain_oom(
        raised_in(out_in_backward),
        ALONE,
        folder=None,
        batch_size=batch_size,
        accumulate=accumulate,
        static_bytes=2 * GIB,
    )
    assert re.search(f"{remedy}$", line)


@pytest.mark.parametrize("batch", [8, 24, 100, 256, 1000])
@pytest.mark.parametrize("forward_done", [True, False])
def test_estimate_is_smaller_and_a_multiple_of_8(batch: int, forward_done: bool) -> None:
    found = estimate(
        peak=50 * GIB,
        wanted=GIB,
        available=80 * GIB,
        static=0,
        expected=0,
        images=batch,
        forward_done=forward_done,
    )
    assert found.batch % 8 == 0
    assert 0 <= found.batch < batch
    # There is enough memory: only the failure shows that the batch is too large.
    assert found.batch >= batch // 2 - 7


def test_only_the_model_fits(full) -> None:
    full(peak=78, reserved=78.5, free=0.5)
    line = explain_oom(out(), world(4), folder=None, batch_size=256, static_bytes=75 * GIB)
    assert line.endswith(
        "even a batch of 32 may not fit: use a smaller model.name or data.image_size"
    )


def test_other_processes_on_the_gpu_and_a_memory_fraction(full) -> None:
    full(peak=38, reserved=39, free=1)
    line = explain_oom(raised_in(out_in_backward), ALONE, folder=None, batch_size=256)
    assert "free, 40.0 GiB in use outside this process's allocator)" in line
    assert "loader.batch_size=224 should fit" in line  # 0.9 * 40 of (38 + 2) / 256
    full(peak=38, reserved=38, free=42, fraction=0.5)
    assert "=224 should fit" in explain_oom(
        raised_in(out_in_backward), ALONE, folder=None, batch_size=256
    )


@pytest.mark.parametrize(
    ("text", "bytes_wanted"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 << 20),
        ("Tried to allocate 1.50 GiB (GPU 0; 79.3 GiB total", 3 << 29),
        ("CUDA out of memory. Tried to allocate 512 bytes", 512),
        ("Allocation on device", 0),
        ("", 0),
    ],
)
def test_requested_bytes(text: str, bytes_wanted: int) -> None:
    assert out_of_memory._requested_bytes(text) == bytes_wanted


def test_full_disk(full, tmp_path: Path, file_size_limit, monkeypatch: pytest.MonkeyPatch) -> None:
    full(peak=78, reserved=78.5, free=0.5)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(bytes(2**20))
    )
    with file_size_limit(2**16):
        line = explain_oom(out(), ALONE, folder=tmp_path, batch_size=256)
    assert "or loader.batch_size=128; no memory snapshot could be written (OSError" in line
    assert "\n" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["memory_stats", "mem_get_info", "get_per_process_memory_fraction"]
)
def test_failing_memory_statistics(
    full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(
            "CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA"
        )

    full(peak=78, reserved=78.5, free=0.5)
    monkeypatch.setattr(torch.cuda, name, fail)
    line = explain_oom(out(), ALONE, folder=tmp_path, batch_size=256)
    assert (
        "loader.batch_size=256: out of memory on cuda:0 (OutOfMemoryError: CUDA out of "
        "memory. Tried" in line
    )
    assert "oom-rank0.pickle" in line and "\n" not in line


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("no allocator"),
        AttributeError("_dump_snapshot"),
        MemoryError(),
    ],
)
def test_failing_snapshot(
    full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(path: str) -> None:
        raise problem

    full(peak=78, reserved=78.5, free=0.5)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fail)
    assert type(problem).__name__ in explain_oom(out(), ALONE, folder=tmp_path, batch_size=256)
    assert list(tmp_path.iterdir()) == []


def test_never_raises_without_a_gpu(tmp_path: Path) -> None:
    line = explain_oom(
        out(), world(0, device=torch.device("cuda", 99)), folder=tmp_path / "gone", batch_size=0
    )
    assert line.startswith("loader.batch_size=0: out of memory on cuda:99") and "\n" not in line


@pytest.mark.parametrize(
    ("name", "momentum", "ema", "copies"),
    [
        ("sgd", 0.9, None, 3),
        ("sgd", 0.0, None, 2),
        ("adamw", 0.9, None, 4),
        ("adamw", 0.9, 0.99, 5),
        ("lamb", 0.9, None, 4),
    ],
)
def test_fixed_bytes(name: str, momentum: float, ema: float | None, copies: int) -> None:
    """The estimate before the first step equals the memory after it."""
    model = nn.Linear(100, 1000)
    optim = Optim(name=name, momentum=momentum, nesterov=False)
    average = MovingAverage(model, ema) if ema is not None else None
    state = TrainState(model, build_optimizer(model, optim), average)
    estimated = fixed_bytes(state)
    assert abs(estimated - copies * 4 * 101_000) <= 8  # the average's counter
    model(torch.ones(2, 100)).sum().backward()
    state.optimizer.step()
    moments = [
        t
        for values in state.optimizer.state.values()
        for t in values.values()
        if torch.is_tensor(t) and t.dim()
    ]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    held = [
        *model.parameters(),
        *grads,
        *moments,
        *([] if average is None else [*average.parameters(), *average.buffers()]),
    ]
    assert estimated == sum(t.nbytes for t in held)


def test_activation_bytes() -> None:
    """The mode is kept; weights and tensors that two layers save count once."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 4, 3),
        )

    with torch.device("meta"):
        meta = model().eval()
    kept = 3 * 32 * 32 + 2 * 16 * 32 * 32  # the input, BatchNorm's and the second convolution's
    gradients = 2 * 16 * 32 * 32
    assert (
        abs(activation_bytes(meta, 32, torch.float32) - 4 * (kept + gradients)) <= 4 * 16 * 2
    )  # BatchNorm statistics
    assert (
        activation_bytes(meta, 32, torch.bfloat16) == activation_bytes(meta, 32, torch.float32) // 2
    )
    assert not meta.training
    assert (
        activation_bytes(nn.Linear(7, 7, device="meta"), 32, torch.float32) == 0
    )  # not an image model


@pytest.fixture
def small_gpu() -> Iterator[int]:
    """A GPU limited to 8 GiB, with an empty cache."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(CUDA)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 8 * GIB / total), CUDA)
    yield 8 * GIB
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    torch.cuda.empty_cache()


def convnet() -> nn.Module:
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(8):
        blocks += [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.gpu
@pytest.mark.parametrize("first", [144, 512, 4096])
@pytest.mark.parametrize("expects", [False, True])
def test_on_a_gpu(small_gpu: int, tmp_path: Path, first: int, expects: bool) -> None:
    """The suggested batch fits: at once with `image_bytes`, otherwise after a few attempts."""
    with torch.device("meta"):
        expected = activation_bytes(convnet(), 128, torch.float32) if expects else 0
    model = convnet().to(CUDA)
    state = TrainState(model, build_optimizer(model, Optim()))

    def step(batch: int) -> None:
        images = torch.ones(batch, 3, 128, 128, device=CUDA)
        model(images).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)

    def attempt(batch: int) -> str | None:
        torch.cuda.reset_peak_memory_stats(CUDA)
        try:
            step(batch)
            return None
        except torch.cuda.OutOfMemoryError as error:
            before = torch.cuda.memory_allocated(CUDA)
            line = explain_oom(
                error,
                ALONE,
                folder=tmp_path,
                batch_size=batch,
                static_bytes=fixed_bytes(state),
                image_bytes=expected,
            )
            assert torch.cuda.memory_allocated(CUDA) == before
            return line

    lines = []
    batch = first
    while (line := attempt(batch)) is not None:
        print(line)
        lines.append(line)
        found = re.search(r"loader.batch_size=(\d+)(?: should fit)?;", line)
        assert found and int(found[1]) < batch
        batch = int(found[1])
        state.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    print(f"{batch} fits")
    assert 1 <= len(lines) <= (1 if expects else 7)
    assert batch >= 32  # about 17 activations of 4 MiB and two gradients: 100 images fit
    with open(tmp_path / "oom-rank0.pickle", "rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"] and snapshot["segments"][0]["blocks"]
