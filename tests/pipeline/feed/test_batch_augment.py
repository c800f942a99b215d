"""Batch transforms mix pixels and targets in proportion, drawn from (seed, step, rank)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import RandomErasing

from pipeline.data.augment import build_by_name
from pipeline.feed.batch_augment import (
    BATCH_TRANSFORMS,
    BLOCK,
    BatchTransforms,
    blend,
    find_partners,
)
from tests.helpers.batches import batch_of
from tests.helpers.results import same

COUNT, SIZE = 64, 32


def one(name: str, **parameters: Any) -> Any:
    return build_by_name([{name: parameters}], BATCH_TRANSFORMS, key="augment.batch")[0]


def batch() -> tuple[Tensor, Tensor]:
    """Return samples i with color i + 1 and class i; a value identifies a pixel's source."""
    images = torch.arange(1.0, COUNT + 1)[:, None, None, None].expand(COUNT, 3, SIZE, SIZE).clone()
    return images, torch.eye(COUNT)


def transforms(*names: Any, seed: int = 0, rank: int = 0, ranks: int = 1) -> BatchTransforms:
    """Return one rank's transforms for batches with targets."""
    return BatchTransforms(names, COUNT, seed, ["image"], "target", rank=rank, world_size=ranks)


def drawn_by(seed: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, step, 0, 1]))


def run(transform: Any, images: Tensor, targets: Tensor, step: int = 0, **place: int) -> Any:
    """Draw and apply a transform; return images and targets."""
    mixing = transforms(transform, **place)
    batch = batch_of(step, image=images, target=targets)
    batch.fields.update(mixing.draw(batch.fields, step))
    mixed = mixing.mix(batch)
    assert [*mixed.fields] == ["image", "target"]
    return mixed["image"], mixed["target"]


def neighbors() -> np.ndarray:
    rows = np.arange(COUNT)
    return rows // BLOCK * BLOCK + (rows - 1) % BLOCK


def is_box(inside: np.ndarray) -> bool:
    """Return whether a mask [S, S] is empty or one filled rectangle."""
    return bool((inside == np.outer(inside.any(axis=1), inside.any(axis=0))).all())


def test_batch_transforms_draw_by_seed_and_step():
    places = (0, 0), (1, 0), (0, 1), (1, 0)
    found = [run(one("mixup"), *batch(), step, seed=seed)[1] for seed, step in places]
    assert torch.equal(found[1], found[3])
    assert len({targets.sum(0)[0].item() for targets in found}) == 3


def test_mixup_blends_pixels_and_targets():
    images, targets = run(one("mixup", alpha=5.0), *batch())
    own = targets[range(COUNT), range(COUNT)]
    other = targets[range(COUNT), neighbors()]
    torch.testing.assert_close(targets.sum(1), torch.ones(COUNT))
    torch.testing.assert_close(own + other, torch.ones(COUNT))
    values = torch.arange(1.0, COUNT + 1)
    expected = own * values + other * values[neighbors()]
    torch.testing.assert_close(images, expected[:, None, None, None].expand_as(images))
    assert len(set(own.tolist())) > COUNT / 2  # separate weights for each image


def test_cutmix_box_area_is_weight():
    images, targets = run(one("cutmix", alpha=1.0), *batch())
    torch.testing.assert_close(targets.sum(1), torch.ones(COUNT))
    rows, others = torch.arange(COUNT), torch.from_numpy(neighbors())
    pasted = images == others[:, None, None, None] + 1
    assert torch.equal(images, torch.where(pasted[:, :1], images, batch()[0]))
    assert torch.equal(pasted, pasted[:, :1].expand_as(pasted))  # the same in all channels
    assert all(map(is_box, pasted[:, 0].numpy()))
    areas = pasted[:, 0].float().mean((1, 2))
    torch.testing.assert_close(targets[rows, others], areas)
    torch.testing.assert_close(targets[rows, rows], 1 - areas)
    assert len(areas.unique()) > COUNT / 2
    assert areas.min() < 0.1
    assert areas.max() > 0.5


def test_random_erasing_clears_box():
    """The border does not clip a box, wherever it is."""
    erasing = one("random_erasing", p=0.25, scale=[0.1, 0.2], ratio=[0.5, 2.0])
    erased = []
    for step in range(20):
        images, targets = run(erasing, *batch(), step)
        assert torch.equal(targets, torch.eye(COUNT))
        cleared = images[:, :1] == 0  # [B, 1, S, S]
        assert torch.equal(images, batch()[0].masked_fill(cleared, 0))
        erased += [mask[0].numpy() for mask in cleared if mask.any()]
    assert 0.2 < len(erased) / (20 * COUNT) < 0.3
    for mask in erased:
        assert is_box(mask)
        assert 0.08 < mask.mean() < 0.23
        assert 0.4 < mask.any(0).sum() / mask.any(1).sum() < 2.5


@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.3])
def test_random_erasing_box_equals_torchvision(ratio):
    options = {"scale": (0.1, 0.1), "ratio": (ratio, ratio)}
    images, _ = run(one("random_erasing", p=1.0, **options), *batch())
    erased = images[:, 0] == 0
    height, width = RandomErasing.get_params(images[0], **options)[2:4]
    assert (erased.any(2).sum(1) == height).all()
    assert (erased.any(1).sum(1) == width).all()


def drawn(step: int, count: int, size: int) -> tuple[np.ndarray, ...]:
    """Return whether cutmix, weights and (x, y) centers as drawn by mixup_or_cutmix by default."""
    rng = drawn_by(0, step)
    rng.random(count)
    cut = rng.random(count) < 0.5
    alpha = np.where(cut, 1.0, 0.2)
    return cut, rng.beta(alpha, alpha), np.floor(rng.random((2, count)) * size).astype(int)


def test_mixup_or_cutmix_equals_torchvision(monkeypatch):
    """The group, which is one block, has one choice, one weight and one box; 64 steps."""
    from torchvision.transforms import v2

    transform, images = one("mixup_or_cutmix"), torch.randn(BLOCK, 3, 33, 33)
    labels = torch.arange(BLOCK)
    kinds = []
    for step in range(64):
        (cut,), (weight,), centers = drawn(step, 1, 33)
        theirs = (v2.CutMix if cut else v2.MixUp)(num_classes=BLOCK)
        theirs._dist = SimpleNamespace(sample=lambda _, weight=weight: weight)
        with monkeypatch.context() as patch:
            places = iter(torch.from_numpy(centers))  # x, then y
            patch.setattr(torch, "randint", lambda *_, places=places, **__: next(places))
            expected = theirs(images, labels)
        found = run(transform, images, torch.eye(BLOCK), step)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        kinds.append(cut)
    assert 20 < sum(kinds) < 44


@pytest.mark.parametrize(
    ("group", "sizes"), [(1, [1] * 10), (4, [4, 4, 2]), (10, [10]), (99, [10])]
)
def test_mixup_or_cutmix_group_sizes(group, sizes):
    transform = one("mixup_or_cutmix", switch_p=0, group=group)
    _, targets = run(transform, torch.zeros(10, 1, 1, 1), torch.eye(10))
    assert targets.diagonal().unique_consecutive(return_counts=True)[1].tolist() == sizes


@pytest.mark.parametrize(
    "transform",
    [
        *(one(name, p=0.7) for name in BATCH_TRANSFORMS),
        one("mixup_or_cutmix", p=0.7, group=1),
        one("mixup_or_cutmix", p=0.7, group=6),
    ],
)
def test_batch_transforms_of_ranks_equal_one_process(transform):
    total = 48
    images, targets = torch.randn(total, 3, 8, 8), torch.eye(total)
    whole = run(transform, images, targets, 5, seed=3)
    for ranks in (2, 4, 6):
        parts = []
        for rank in range(ranks):
            rows = slice(rank * total // ranks, (rank + 1) * total // ranks)
            place = {"seed": 3, "rank": rank, "ranks": ranks}
            parts.append(run(transform, images[rows], targets[rows], 5, **place))
        found = [torch.cat(fields) for fields in zip(*parts, strict=True)]
        assert same(found, [*whole])


@pytest.mark.parametrize(("total", "ranks"), [(24, 2), (12, 2), (9, 3), (10, 2), (7, 1), (6, 3)])
def test_partners_in_small_shard(total, ranks):
    rows = torch.arange(float(total // ranks))
    partners = blend(rows, torch.zeros_like(rows), find_partners(rows))
    assert sorted(partners.tolist()) == rows.tolist()
    assert not (partners == rows).any()


@pytest.mark.parametrize(("p", "low", "high"), [(0.0, 0.0, 0.0), (0.3, 0.25, 0.35)])
@pytest.mark.parametrize("name", BATCH_TRANSFORMS)
def test_batch_transforms_p_is_changed_fraction(name, p, low, high):
    images, targets = batch()
    changed = []
    transform = one(name, p=p)
    transform.group = 1  # MixupOrCutmix
    for step in range(40):
        found, _ = run(transform, images, targets, step)
        changed.append((found != images).flatten(1).any(1))
    assert low <= torch.cat(changed).float().mean().item() <= high
    assert torch.equal(images, batch()[0])
    assert torch.equal(targets, torch.eye(COUNT))
