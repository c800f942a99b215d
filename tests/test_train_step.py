"""One optimiser step against a computation by hand: float64 NumPy, from the formulas of the papers and of torch.optim."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import train
from conf import cli
from conf.schema import Config
from engine import meters
from engine.distributed import World
from engine.optim import build_optimizer
from engine.plan import Plan
from engine.state import MovingAverage, TrainState
from pipeline.build import build_datasets
from pipeline.prefetcher import Batch

BATCH, FEATURES, CLASSES = 4, 12, 3
LEARNING_RATES = (0.5, 0.3, 0.4, 0.05, 0.2)
CLIP_NORM, MOMENTUM, WEIGHT_DECAY, SMOOTHING, EMA_DECAY = 1.0, 0.9, 0.05, 0.1, 0.5
OPTIONS = [f"optim.clip_norm={CLIP_NORM}", f"optim.momentum={MOMENTUM}", f"optim.weight_decay={WEIGHT_DECAY}", "optim=sgd",
           "optim.nesterov=true", "optim.decay_norms=true", f"train.label_smoothing={SMOOTHING}",
           f"train.ema_decay={EMA_DECAY}", "train.device=cpu", "loader.batch_size=4", "data.image_size=32"]  # fmt: skip


def ema_decay(step: int) -> float:
    """The share of the average that step `step` (from 0) keeps: it warms up to EMA_DECAY, which the third step reaches."""
    return min(EMA_DECAY, 1 - (1 + step) ** (-2 / 3))


def batch_of(step: int, mixed: bool) -> Batch:
    """Images [B, 3, 2, 2]; with `mixed`, targets as mixup makes them, float32 [B, classes]."""
    rng = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 2, 2, generator=rng)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=rng)
    targets = torch.softmax(torch.randn(BATCH, CLASSES, generator=rng), 1) if mixed else labels
    return Batch(images, labels, targets, step)


@pytest.fixture(scope="module")
def config_and_plan(image_root: Path) -> tuple[Config, Plan]:
    config = cli.load([*OPTIONS, f"data.root={image_root}", "model.name=resnet_tiny"])
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
    return config, train.make_plan(config, build_datasets(config), world)


@pytest.mark.parametrize("mixed", [False, True], ids=["labels", "mixed targets"])
def test_five_steps_by_hand(mixed: bool, config_and_plan: tuple[Config, Plan]) -> None:
    """Label smoothing, clipping, weight decay, Nesterov momentum and the average, each in its place."""
    config, plan = config_and_plan
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    state = TrainState(model, build_optimizer(model, config.optim), MovingAverage(model, EMA_DECAY))

    weights = [parameter.detach().double().numpy() for parameter in (model[1].weight, model[1].bias)]
    momenta: list[np.ndarray] = []
    averages = weights
    clipped = []
    for step, lr in enumerate(LEARNING_RATES):
        batch = batch_of(step, mixed)
        x = batch.images.double().numpy().reshape(BATCH, FEATURES)
        labels = batch.labels.numpy()
        targets = batch.targets.double().numpy() if mixed else np.eye(CLASSES)[labels]

        # Cross entropy against targets mixed with the uniform distribution (arXiv 1512.00567, section 7).
        logits = x @ weights[0].T + weights[1]
        log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        smooth = (1 - SMOOTHING) * targets + SMOOTHING / CLASSES
        loss_sum = -(smooth * log_probabilities).sum()
        error = (np.exp(log_probabilities) - smooth) / BATCH
        gradients = [error.T @ x, error.sum(0)]

        # Clipping by the norm of all gradients together (arXiv 1211.5063), before weight decay is added.
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        clipped.append(bool(norm > CLIP_NORM))
        gradients = [gradient * min(1, CLIP_NORM / norm) for gradient in gradients]

        # torch.optim.SGD: the first step has no momentum yet.
        gradients = [g + WEIGHT_DECAY * w for g, w in zip(gradients, weights, strict=True)]
        momenta = [MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)] if momenta else gradients
        weights = [w - lr * (g + MOMENTUM * m) for w, g, m in zip(weights, gradients, momenta, strict=True)]
        decay = ema_decay(step)
        averages = [decay * a + (1 - decay) * w for a, w in zip(averages, weights, strict=True)]

        values = train.train_step(state, model, meters.objective, batch, lr=lr, config=config, plan=plan)

        hits = (logits.argmax(1) == labels).sum()
        assert values.tolist() == pytest.approx([loss_sum, hits, BATCH, BATCH], rel=1e-5)
        assert state.ema is not None
        for network, expected in ((model, weights), (state.ema.module, averages)):
            for found, value in zip(network.parameters(), expected, strict=True):
                np.testing.assert_allclose(found.detach().numpy(), value, rtol=1e-4, atol=1e-6, err_msg=f"step {step}")
        assert all(parameter.grad is None for parameter in model.parameters())
    assert len(set(clipped)) == 2, "clipping must act in some steps and not in others"
