"""Batch transforms: pixels and targets mix in proportion, drawn from (seed, step, rank)."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conf.schema import UserError
from models.zoo import import_torchvision
from pipeline.augment import build
from pipeline.batch_augment import BATCH_TRANSFORMS, batch_rng
from tests.distributions import same_distribution

COUNT, SIDE = 64, 32


def one(name: str, **parameters: Any) -> Any:
    return build([{name: parameters}], BATCH_TRANSFORMS, key="augment.batch")[0]


def batch() -> tuple[Tensor, Tensor]:
    """Sample i has colour i + 1 and class i: its value identifies a pixel's source."""
    images = torch.arange(1.0, COUNT + 1)[:, None, None, None].expand(COUNT, 3, SIDE, SIDE).clone()
    return images, torch.eye(COUNT)


def neighbours() -> np.ndarray:
    return (np.arange(COUNT) - 1) % COUNT


def is_box(inside: np.ndarray) -> bool:
    """Return whether a mask [S, S] is one filled rectangle, or empty."""
    return bool((inside == np.outer(inside.any(axis=1), inside.any(axis=0))).all())


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_mixup_blends_pixels_and_targets_alike(alpha: float) -> None:
    images, targets = one("mixup", alpha=alpha)(*batch(), batch_rng(0, 0, 0))
    own = targets[range(COUNT), range(COUNT)]
    other = targets[range(COUNT), neighbours()]
    torch.testing.assert_close(targets.sum(1), torch.ones(COUNT))
    torch.testing.assert_close(own + other, torch.ones(COUNT))
    values = torch.arange(1.0, COUNT + 1)
    expected = own * values + other * values[neighbours()]
    torch.testing.assert_close(images, expected[:, None, None, None].expand_as(images))
    assert len(set(own.tolist())) > COUNT / 2  # a weight of its own for each image


def test_mixup_draws_its_weights_from_a_beta_distribution() -> None:
    mixup, images, targets = one("mixup", alpha=0.2), torch.zeros(COUNT, 3, 1, 1), torch.eye(COUNT)
    weights = torch.cat(
        [mixup(images, targets, batch_rng(0, step, 0))[1].diagonal() for step in range(50)]
    )
    # Beta(a, a): mean 1/2, variance 1 / (4 (2a + 1)); 3,200 draws
    assert weights.mean().item() == pytest.approx(0.5, abs=0.03)
    assert weights.var().item() == pytest.approx(1 / (4 * 1.4), abs=0.01)


def test_cutmix_pastes_a_box_and_its_area_is_the_weight() -> None:
    images, targets = one("cutmix", alpha=1.0)(*batch(), batch_rng(0, 0, 0))
    torch.testing.assert_close(targets.sum(1), torch.ones(COUNT))
    areas = []
    for i, j in enumerate(neighbours().tolist()):
        pasted = (images[i] == j + 1).numpy()
        assert (pasted | (images[i] == i + 1).numpy()).all()
        assert (pasted == pasted[0]).all()  # the same in all channels
        assert is_box(pasted[0])
        areas.append(pasted[0].mean())
        assert targets[i, j].item() == pytest.approx(areas[-1], abs=1e-6)
        assert targets[i, i].item() == pytest.approx(1 - areas[-1], abs=1e-6)
    assert len(set(areas)) > COUNT / 2
    assert min(areas) < 0.1
    assert max(areas) > 0.5


def test_boxes_cover_every_pixel_about_equally() -> None:
    hits = np.zeros((SIDE, SIDE))
    cutmix = one("cutmix", alpha=1.0)
    for step in range(60):
        images, _ = cutmix(*batch(), batch_rng(0, step, 0))
        hits += (images[:, 0] != batch()[0][:, 0]).float().mean(0).numpy() / 60
    assert hits.min() > 0.1
    assert abs(hits[: SIDE // 2].mean() - hits[SIDE // 2 :].mean()) < 0.03
    assert abs(hits[:, : SIDE // 2].mean() - hits[:, SIDE // 2 :].mean()) < 0.03


def test_erasing_clears_a_box_and_keeps_the_targets() -> None:
    erasing = one("random_erasing", p=0.25, scale=[0.1, 0.2], ratio=[0.5, 2.0])
    erased = 0
    for step in range(20):
        images, targets = erasing(*batch(), batch_rng(0, step, 0))
        torch.testing.assert_close(targets, torch.eye(COUNT), rtol=0, atol=0)
        for i in range(COUNT):
            cleared = (images[i] == 0).numpy()
            assert (cleared | (images[i] == i + 1).numpy()).all()
            assert (cleared == cleared[0]).all()
            assert is_box(cleared[0])
            erased += bool(cleared.any())
            if cleared.any():
                assert (
                    0.08 < cleared[0].mean() < 0.23
                )  # wherever it lies: the border does not cut it
                assert 0.4 < cleared[0].any(axis=1).sum() / cleared[0].any(axis=0).sum() < 2.5
    assert 0.2 < erased / (20 * COUNT) < 0.3


ERASING = [((0.02, 0.33), (0.3, 3.3)), ((0.1, 0.3), (1.5, 3.0)), ((0.3, 1.0), (0.2, 8.0))]


@pytest.mark.parametrize(("scale", "ratio"), ERASING, ids=["usual", "tall", "often too large"])
@pytest.mark.parametrize("side", [224, 32])
def test_erased_boxes_are_distributed_as_torchvisions(
    side: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    assert import_torchvision()
    from torchvision.transforms import RandomErasing

    draws, image = 4000, torch.empty(1, side, side)
    torch.manual_seed(0)
    top, left, height, width = torch.tensor(
        [RandomErasing.get_params(image, scale, ratio, [0.0])[:4] for _ in range(draws)]
    ).T.numpy()
    erased = height < side  # all of the image stands for a box that was not found
    boxes = one("random_erasing", p=1.0, scale=scale, ratio=ratio).boxes(
        draws, side, batch_rng(0, 0, 0)
    )
    ours = boxes[:, 2] > boxes[:, 0]
    assert abs(ours.mean() - erased.mean()) < 0.03
    x, y, right, bottom = boxes[ours].T
    top, left, height, width = (values[erased] for values in (top, left, height, width))
    for mine, theirs in (
        (x, left),
        (y, top),
        (right - x, width),
        (bottom - y, height),
        ((right - x) * (bottom - y), width * height),
        ((right - x) / (bottom - y), width / height),
    ):
        assert same_distribution(mine, theirs)
    assert not same_distribution(x, left + 0.08 * side)  # the test has the power to tell


def test_cutmix_weights_are_distributed_as_torchvisions() -> None:
    """The weight of a box is its area within the image."""
    assert import_torchvision()
    from torchvision.transforms.v2 import CutMix

    theirs, image, cutmix = CutMix(num_classes=2), torch.empty(3, 224, 224), one("cutmix")
    torch.manual_seed(0)
    weights = np.array([theirs.make_params([image])["lam_adjusted"] for _ in range(2000)])
    images, targets = torch.zeros(200, 1, 224, 224), torch.eye(200)
    ours = torch.cat(
        [cutmix(images, targets, batch_rng(0, step, 0))[1].diagonal() for step in range(10)]
    ).numpy()
    assert same_distribution(ours, weights)
    assert not same_distribution(
        ours, np.random.default_rng(0).random(2000)
    )  # not Beta(1, 1), from which the box follows


@pytest.mark.parametrize("name", BATCH_TRANSFORMS)
def test_draws_depend_on_seed_step_and_rank_and_nothing_else(name: str) -> None:
    transform, again = one(name, p=1.0), one(name, p=1.0)
    keys = list(itertools.product((0, 1), (0, 1, 5), (0, 1)))
    first = {key: transform(*batch(), batch_rng(*key)) for key in keys}
    for key in reversed(keys):  # in another order
        for ours, theirs in zip(again(*batch(), batch_rng(*key)), first[key], strict=True):
            assert torch.equal(ours, theirs)
    assert len({images.numpy().tobytes() for images, _ in first.values()}) == len(keys)


@pytest.mark.parametrize("name", BATCH_TRANSFORMS)
def test_input_is_not_modified_and_p_0_changes_nothing(name: str) -> None:
    images, targets = torch.randn(8, 3, 16, 16), torch.eye(8)
    before = images.clone(), targets.clone()
    for p in (0.0, 1.0):
        mixed = one(name, p=p)(images, targets, batch_rng(0, 0, 0))
        assert torch.equal(images, before[0])
        assert torch.equal(targets, before[1])
        assert torch.equal(mixed[0], images) == (p == 0)
        assert [(t.shape, t.dtype) for t in mixed] == [
            ((8, 3, 16, 16), torch.float32),
            ((8, 8), torch.float32),
        ]
        if p == 0:
            assert torch.equal(mixed[1], targets)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_p_is_the_fraction_of_mixed_images(name: str) -> None:
    transform = one(name, p=0.3)
    mixed = [transform(*batch(), batch_rng(0, step, 0))[1].diagonal() < 1 for step in range(40)]
    assert 0.25 < torch.cat(mixed).float().mean().item() < 0.33


@pytest.mark.parametrize("name", BATCH_TRANSFORMS)
def test_memory_format_makes_no_difference(name: str) -> None:
    images, targets = torch.randn(8, 3, 16, 16), torch.eye(8)
    plain, _ = one(name, p=1.0)(images, targets, batch_rng(0, 0, 0))
    last, _ = one(name, p=1.0)(
        images.to(memory_format=torch.channels_last), targets, batch_rng(0, 0, 0)
    )
    assert torch.equal(plain, last)


@pytest.mark.parametrize("name", BATCH_TRANSFORMS)
@pytest.mark.parametrize("count", [1, 2])
def test_smallest_batches(name: str, count: int) -> None:
    images, targets = one(name, p=1.0)(
        torch.ones(count, 3, 8, 8), torch.eye(count), batch_rng(0, 0, 0)
    )
    assert images.isfinite().all()
    torch.testing.assert_close(targets.sum(1), torch.ones(count))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("mixup", {"alpha": alpha}) for alpha in (0, -1, NAN, INF, "x", None)),
        *(("cutmix", {"alpha": alpha}) for alpha in (0, NAN, [1])),
        *((name, {"p": p}) for name in BATCH_TRANSFORMS for p in (-0.1, 1.1, NAN, "x", None)),
        *(
            ("random_erasing", {"scale": scale})
            for scale in ([0, 1], [0.5, 0.2], [0.1, 1.1], [NAN, 1], 0.5, [1, 1, 1], None)
        ),
        *(
            ("random_erasing", {"ratio": ratio})
            for ratio in ([0, 1], [2, 1], [1, INF], [NAN, 1], None)
        ),
    ],
)
def test_invalid_parameter_is_refused(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=f"^augment.batch: {name}: {next(iter(parameters))}=.*: give "
    ):
        one(name, **parameters)


def test_unknown_name_or_parameter_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"^augment.batch: there is no transform mixp; choose from .*; did you mean mixup\?",
    ):
        one("mixp")
    with pytest.raises(
        UserError, match=r"^augment.batch: cutmix has no parameter beta; it has alpha, p$"
    ):
        one("cutmix", beta=1)
    with pytest.raises(UserError, match=r"^augment.batch: there is no transform horizontal_flip"):
        one("horizontal_flip")


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCH_TRANSFORMS)
def test_gpu_and_cpu_see_the_same_draws(name: str) -> None:
    images, targets = torch.randn(16, 3, 32, 32), torch.eye(16)
    ours = one(name)(images, targets, batch_rng(3, 4, 0))
    theirs = one(name)(images.cuda(), targets.cuda(), batch_rng(3, 4, 0))
    for cpu, gpu in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-6, atol=1e-6)
