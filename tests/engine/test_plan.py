"""The plan of a run: steps, validations, log rows, checkpoints, precision, FLOPs."""

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import models
from conf import cli
from conf.schema import Data, Model, Train, UserError
from engine.compute import (
    choose_precision,
    count_flops,
    dtype_of,
    resolve_compile,
)
from engine.distributed import World
from engine.plan import (
    Plan,
    check_batch,
    check_channels,
    count_steps,
    few_steps,
    make_plan,
    micro_batches,
)
from pipeline.build import build_datasets
from tests.engine.plans import ALONE, config, plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def steps_where(plan: Plan, test: str) -> list[int]:
    return [step for step in range(plan.stop_step + 1) if getattr(plan.due(step), test)]


@pytest.mark.parametrize(
    ("epochs", "images", "batch", "steps"),
    [
        (90, 1_281_167, 256, 450_411),  # 450,410.3
        (1, 100, 50, 2),
        (1, 101, 50, 3),
        (0.001, 100, 50, 1),
        (1.1, 100, 10, 11),  # 11.000000000000002 in floating point
        (2.2, 50_000, 8, 13_750),
    ],
)
def test_count_steps(epochs: float, images: int, batch: int, steps: int) -> None:
    assert count_steps(epochs=epochs, train_images=images, batch_size=batch) == steps


@pytest.mark.parametrize(("images", "batch"), [(100, 30), (100, 100), (36, 8), (1_281_167, 1024)])
def test_every_epoch_is_validated_once(images: int, batch: int) -> None:
    """After the first step with epoch * images <= step * batch."""
    found = steps_where(plan(images, batch, epochs=4), "validate")
    assert found == [math.ceil(epoch * images / batch) for epoch in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("what", "epochs", "max_steps", "every", "steps"),
    [
        ("validate", 5, None, 2, [20, 40, 50]),
        ("validate", 1.5, None, 1, [10, 15]),
        ("validate", 5, 33, 1, [10, 20, 30, 33]),
        ("validate", 2, None, 50, [20]),
        ("log", 1.2, None, 1, [5, 10, 12]),
        ("save", 1.5, None, 1, [4, 8, 10, 12, 15]),
        ("epoch", 1.5, None, 50, [10]),
    ],
)
def test_what_is_due(
    what: str, epochs: float, max_steps: int | None, every: int, steps: list[int]
) -> None:
    """Ten steps per epoch, log.every_steps=5, checkpoint.every_steps=4."""
    given = config(10, epochs, max_steps, validate_every=every)
    found = steps_where(plan(100, 10, epochs, max_steps, config=given), what)
    assert [step for step in found if step] == steps


def test_epochs_of_a_step() -> None:
    given = plan(100, 30)
    assert given.steps_per_epoch == pytest.approx(10 / 3)
    assert [given.epochs_ended(step) for step in (0, 3, 4, 6, 7, 10)] == [0, 0, 1, 1, 2, 3]
    assert [given.epoch(step) for step in (0, 5, 10)] == pytest.approx([0, 1.5, 3])
    assert plan(1_281_167, 256).epochs_ended(450_411) == 90
    assert given.stop_step == 14 and given.epoch(14) == 4  # without the rest of the last batch, 4.2


@pytest.mark.parametrize(
    ("capability", "auto"), [((9, 0), "bf16"), ((7, 5), "fp16"), ((6, 0), "fp32")]
)
def test_precision(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], auto: str) -> None:
    """On older GPUs, torch emulates bf16, and reports it as supported by default."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or auto == "bf16",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choices = ("auto", "bf16", "fp16", "tf32", "fp32")
    assert [choose_precision(choice, CPU) for choice in choices] == ["fp32", *choices[1:]]
    assert [choose_precision(choice, CUDA) for choice in choices] == [auto, *choices[1:]]


FAKE = ("data=fake", "data.fake_images=25", "data.fake_classes=10")


def planned(*overrides: str, data: tuple[str, ...] = FAKE) -> Plan:
    """The plan of a small model, with 25 images of 10 classes."""
    options = ["model=resnet_tiny", "data.image_size=32", "loader.batch_size=5", "train.epochs=3"]
    given = cli.load([*data, *options, "data.val_size=32", *overrides])
    return make_plan(given, build_datasets(given), ALONE)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("tf32", torch.float32)]
)
def test_dtype_of_a_precision(precision: str, dtype: torch.dtype) -> None:
    given = planned(f"train.precision={precision}")
    assert dtype_of(given.precision) == dtype
    with given.autocast():
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype


def test_class_weights_follow_from_the_images() -> None:
    """Three images of each of the first five classes, two of the others."""
    assert planned().class_weights == ()
    weights = planned("train.class_weights=balanced").class_weights
    assert weights == pytest.approx([25 / 30] * 5 + [25 / 20] * 5)


def test_class_weights_by_name() -> None:
    """In any order; the name of a class may be a number."""
    found = set()
    for typed in ("{b: 3.0, 7: 0.5}", "{7: 0.5, b: 3}"):
        small = ("loader.batch_size=5", "model=resnet_tiny", "data.image_size=32")
        given = cli.load([*FAKE, *small, f"train.class_weights={typed}"])
        datasets = dataclasses.replace(build_datasets(given), classes=(*"abcdef", "7", *"hij"))
        found.add((make_plan(given, datasets, ALONE).class_weights, given.run.name))
    ((weights, _),) = found
    assert weights == (1, 3, 1, 1, 1, 1, 0.5, 1, 1, 1)
    with pytest.raises(UserError) as caught:
        planned("train.class_weights={fake003: 2}")
    assert str(caught.value) == (
        "train.class_weights={fake003: 2}: there is no class fake003; did you mean fake0003?"
    )


def test_notes(image_root: Path) -> None:
    assert planned().notes == ()
    data = ("data=folder", f"data.root={image_root}", "data.val=train")
    text = "\n".join(planned("loader.batch_size=36", data=data).lines())
    for note in (
        "1.0 optimiser steps per epoch are too few to train well; for 36 images, try "
        "loader.batch_size=8 optim.lr=",
        "data.val holds the training images",
    ):
        assert f"note     {note}" in text


@pytest.mark.parametrize(
    ("first_step", "stop_step", "found"),
    [
        (0, 2_000, ("off", "at most 2,000 steps left")),
        (0, 2_001, ("default", "more than 2,000 steps left")),
        (3_000, 5_000, ("off", "at most 2,000 steps left")),
        (3_000, 5_001, ("default", "more than 2,000 steps left")),
        (5_000, 5_000, ("off", "at most 2,000 steps left")),  # the run is finished
    ],
)
def test_compile_mode_on_a_gpu(first_step: int, stop_step: int, found: tuple[str, str]) -> None:
    """The steps count that remain in this start."""
    assert resolve_compile(config(), CUDA, (first_step, {}), stop_step) == found


@pytest.mark.parametrize(
    ("choice", "deterministic", "device", "stored", "found"),
    [
        ("auto", False, CPU, {}, ("off", "")),
        ("default", False, CPU, {}, ("default", "")),
        ("auto", False, CPU, {"model.compile": "default"}, ("off", "")),
        ("auto", True, CPU, {}, ("off", "")),
        ("auto", True, CPU, {"pixels": "cpu"}, ("off", "")),  # train.deterministic was off
        ("auto", True, CPU, {"model.compile": "default"}, ("default", "as in the checkpoint")),
        ("auto", True, CUDA, {"model.compile": "off"}, ("off", "as in the checkpoint")),
        ("off", True, CPU, {"model.compile": "default"}, ("off", "")),  # refused by the identity
    ],
)
def test_compile_mode_of_a_resumed_run(
    choice: str,
    deterministic: bool,
    device: torch.device,
    stored: dict[str, str],
    found: tuple[str, str],
) -> None:
    given = dataclasses.replace(
        config(), model=Model(compile=choice), train=Train(deterministic=deterministic)
    )
    assert found == resolve_compile(given, device, (7, stored), 1_000_000)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "ranks", "found"),
    [
        (101, None, 1, r"loader\.batch_size=101: larger than the training split \(100 images\)"),
        (12, None, 5, r"loader\.batch_size=12: .* multiple of the 5 ranks; set it to 10$"),
        (2, None, 5, r"loader\.batch_size=2: .* set it to 5$"),
        (97, 10, 1, r"train\.micro_batch=10: .*the 97 images .* at most 1; give a divisor of 97,"),
        (100, None, 4, 1),
        (96, 7, 2, 8),  # of 6 images
        (96, 48, 2, 1),
        (64, 8, 2, 4),
        (64, 8, 16, 1),  # of 4 images
        (64, 1, 1, 64),
    ],
)
def test_batches(batch: int, micro_batch: int | None, ranks: int, found: str | int) -> None:
    """Equal parts of at most train.micro_batch images, for any number of ranks."""
    given = dataclasses.replace(config(batch), train=Train(micro_batch=micro_batch))
    with pytest.raises(UserError, match=f"^{found}") if isinstance(found, str) else nullcontext():
        check_batch(given, 100, World(0, ranks, 0, ranks, CPU))
        assert micro_batches(batch // ranks, micro_batch) == found


def test_values_for_each_channel() -> None:
    for mean, std, channels in (([0.5] * 5, [0.2], 5), ([0.5], [0.2], 1), ([0.5], [0.2] * 3, 3)):
        check_channels(Data(mean=mean, std=std), channels)
    message = r"^data\.std: has 3 values, the images have 5 channels; give one value per channel$"
    with pytest.raises(UserError, match=message):
        check_channels(Data(mean=[0.5] * 5), 5)


def test_sync_bn_on_cpus_is_refused() -> None:
    given = dataclasses.replace(config(12), model=Model(sync_bn=True))
    with pytest.raises(UserError, match=r"^model\.sync_bn=true: torch has SyncBatchNorm for GPUs"):
        check_batch(given, 99, World(0, 2, 0, 2, CPU))
    check_batch(given, 99, World(0, 1, 0, 1, CPU))
    check_batch(given, 99, World(0, 2, 0, 2, CUDA))


def test_lines() -> None:
    text = "\n".join(plan(1_281_167, 256, epochs=90, compile_reason="it is short").lines())
    for part in (
        "1,281,167 training and 20 validation images, 10 classes",
        "450,411 of 256 images, 5,004.6 per epoch, 90 epochs",
        "25.56 M parameters, 8.18 GFLOP forward per 224 px image; validated at 256 px",
        "cpu, fp32, compile off (it is short)",
    ):
        assert part in text
    early = plan(100, 10, epochs=5, max_steps=33, world_size=2, channels_last=True).lines()
    steps = "33 of 10 images (5 on each of 2 ranks), 10.0 per epoch, 5 epochs are 50 steps: stops"
    assert f"steps    {steps} early" in early
    assert "device   cpu, fp32, channels_last, compile off" in early


@pytest.mark.parametrize(
    ("micro_batch", "sync_bn", "ranks", "steps", "group"),
    [
        (None, False, 1, " of 1024 images", 1024),
        (None, True, 8, " (128 on each of 8 ranks)", 1024),
        (128, False, 2, " (512 on each of 2 ranks) in 4 micro-batches of 128", 128),
        (128, False, 8, " (128 on each of 8 ranks)", 128),
        (128, True, 2, " (512 on each of 2 ranks) in 4 micro-batches of 128", 256),
    ],
)
def test_lines_say_how_many_images_batch_norm_sees(
    micro_batch: int | None, sync_bn: bool, ranks: int, steps: str, group: int
) -> None:
    given = dataclasses.replace(
        config(1024), train=Train(micro_batch=micro_batch), model=Model(sync_bn=sync_bn)
    )
    parts = micro_batches(1024 // ranks, micro_batch)
    found = plan(2000, config=given, world_size=ranks, micro_batches=parts)
    _, first, second, *_ = found.lines()
    assert f"{steps}, " in first
    assert second.endswith(f"; BatchNorm over {group} images")
    no_norm = plan(2000, config=given, has_batch_norm=False)
    assert "BatchNorm" not in "".join(no_norm.lines())


@pytest.mark.parametrize(
    ("epochs", "line"),
    [(18, "decay 0.9999"), (1, "decay 0.9999 is not reached; its warm-up ends at 0.9982")],
)
def test_the_decay_of_the_average_that_is_reached(epochs: int, line: str) -> None:
    given = dataclasses.replace(config(256), train=Train(epochs=epochs, ema_decay=0.9999))
    assert f"average  {line}" in plan(1_281_167, 256, epochs, config=given).lines()


def test_published_flops() -> None:
    """torchvision publishes 4.089 G multiply-adds for ResNet-50 at 224 px; each counts as two."""
    with torch.device("meta"):
        model = models.build("resnet50", num_classes=1000, image_size=224)
    assert count_flops(model, (3, 224, 224)) == pytest.approx(2 * 4.089e9, rel=0.001)
    assert model.training


@pytest.mark.parametrize(
    ("name", "size", "key"), [("alexnet", 32, "data.image_size"), ("vit_b_16", 48, "augment.val")]
)
def test_image_size_that_the_model_does_not_accept(name: str, size: int, key: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=10, image_size=32)
    message = rf"^{key}: the model does not take images of {size} px with 3 channels \(.*\); give "
    with pytest.raises(UserError, match=message + "another size$"):
        count_flops(model, (3, size, size), key=key)


@pytest.mark.parametrize(
    ("images", "batch", "ranks", "advice"),
    [
        (280, 256, 3, "loader.batch_size=18 optim.lr=0.00703"),
        (2_000, 256, 1, "loader.batch_size=64 optim.lr=0.025"),
        (100, 64, 1, "loader.batch_size=8 optim.lr=0.0125"),
        (2_560, 256, 1, None),  # ten steps
        (36, 8, 1, None),  # no smaller batch is advised
        (1_281_167, 1024, 8, None),
    ],
)
def test_batch_size_too_large_for_the_data(
    images: int, batch: int, ranks: int, advice: str | None
) -> None:
    found = few_steps(batch, 0.1, images, ranks)
    assert [line.split("images, ")[-1] for line in found] == ([f"try {advice}"] if advice else [])
