"""Check the training state in a checkpoint before it is loaded.

The checkpoint may be another program's, or written to do harm. A state that passes can be loaded
and trained; one that does not is refused before the run directory is created.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.state import TrainState

MOST = 1e12  # of any number in the record of a training


def check_state(state: TrainState, stored: dict[str, Any], *, most_steps: int) -> None:
    """Check what `state.load_state_dict` will load.

    Args:
        stored: its tensors may be on the meta device.
        most_steps: length of the training.

    Raises:
        ValueError: a part is missing or of another type, shape or training; names it.
    """
    missing = state.state_dict().keys() - {"losses"} - stored.keys()  # new in a later version
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    weights = state.model.state_dict()
    _check_tensors("model", stored["model"], weights)
    if state.ema is not None and stored["ema"] is not None:
        _check_tensors("ema", stored["ema"], weights)
        steps = {"ema_steps": stored["ema_steps"]}
        _check_tensors("ema_steps", steps, {"ema_steps": state.ema.n_averaged})
    if state.losses is not None and stored.get("losses") is not None:
        _check_tensors("losses", stored["losses"], state.losses.state_dict())
    _check_optimizer(state.optimizer, stored["optimizer"])
    _check_record(stored, most_steps)


def _check_tensors(part: str, stored: Any, own: Mapping[str, Tensor]) -> None:
    """Check that tensors have the names, shapes and kinds of numbers of the program's own.

    Raises:
        ValueError: names the part and the tensor.
    """
    if not isinstance(stored, dict):
        raise ValueError(f"{part} is not a table of tensors")
    for name in [*own, *stored]:
        if name not in own or name not in stored:
            raise ValueError(f"{part}: {name} is {'missing' if name in own else 'unknown'}")
        value, expected = stored[name], own[name]
        if not isinstance(value, Tensor) or value.dtype != expected.dtype:
            raise ValueError(f"{part}: {name} is not {expected.dtype}")
        if value.shape != expected.shape:
            shapes = [list(tensor.shape) for tensor in (value, expected)]
            raise ValueError(f"{part}: {name} has shape {shapes[0]} instead of {shapes[1]}")


def _check_optimizer(optimizer: torch.optim.Optimizer, stored: Any) -> None:
    """Check that an optimiser can load a state, and that it is of the same kind of optimiser.

    Raises:
        ValueError: says what differs.
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("state"), dict):
        raise ValueError("optimizer is not the state of an optimiser")
    own = [group["params"] for group in optimizer.param_groups]
    groups = stored.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(own):
        raise ValueError(f"optimizer does not have {len(own)} groups of parameters")
    numbers = [group.get("params") if isinstance(group, dict) else None for group in groups]
    for listed, parameters in zip(numbers, own, strict=True):
        if not isinstance(listed, list) or len(listed) != len(parameters):
            raise ValueError(f"optimizer has a group without its {len(parameters)} parameters")
    every = [number for listed in numbers for number in listed or ()]
    if every != list(range(len(every))) or not stored["state"].keys() <= set(every):
        raise ValueError("optimizer has other parameters")
    needed = _state_of_one(optimizer)
    for number, parameter in enumerate(p for parameters in own for p in parameters):
        _check_moments(stored["state"].get(number, {}), parameter, needed)


def _state_of_one(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what the optimiser stores for a parameter, float [2], after a step."""
    twin = copy.copy(optimizer)
    group = optimizer.param_groups[0]
    parameter = nn.Parameter(torch.zeros(2, device=group["params"][0].device))
    parameter.grad = torch.zeros_like(parameter)
    twin.param_groups, twin.state = [{**group, "params": [parameter]}], defaultdict(dict)
    twin.step()
    values = twin.state[parameter].items()
    return {name: value for name, value in values if isinstance(value, Tensor)}


def _check_moments(stored: Any, parameter: Tensor, needed: Mapping[str, Tensor]) -> None:
    """Check the state of one parameter; before its first step, it has none.

    Other names than those needed may be of another config, such as optim.momentum=0.
    """
    if not isinstance(stored, dict):
        raise ValueError("optimizer has a state that is not a table")
    known = {name: value for name, value in stored.items() if value is not None}
    if not known:
        return
    missing = [name for name in needed if name not in known]
    if missing:
        raise ValueError(f"optimizer: {missing[0]} is missing: it is of another kind of optimiser")
    for name, value in known.items():
        shape = needed[name].shape if name in needed else parameter.shape
        shape = parameter.shape if shape == (2,) else shape
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != shape:
            raise ValueError(f"optimizer: {name} does not have the shape of its parameter")


def _is_figure(name: Any, value: Any) -> bool:
    """Whether this is the name and value of a time, a step, an accuracy or a loss."""
    if not isinstance(name, str) or type(value) not in (int, float):
        return False
    # A validation loss may overflow.
    return 0 <= value < MOST or (type(value) is float and name.startswith("loss"))


def _check_record(stored: Mapping[str, Any], most_steps: int) -> None:
    """Check the numbers and texts in the state of a training.

    Raises:
        ValueError: names the part.
    """
    if type(stored["step"]) is not int or not 0 <= stored["step"] <= most_steps:
        raise ValueError(f"step is not a number from 0 to {most_steps:,}, the end of the training")
    for name in ("best", "last", "spent"):
        row = stored[name]
        if not isinstance(row, dict) or not all(map(_is_figure, row.keys(), row.values())):
            raise ValueError(f"{name} is not a table of numbers")
    for name in ("best", "last"):
        row = stored[name]
        if row and not (row.keys() >= {"step", "top1"} and row["step"] in range(most_steps + 1)):
            raise ValueError(f"{name} is not the row of a validation")
    history = stored["history"]
    if not isinstance(history, list) or not all(isinstance(line, str) for line in history):
        raise ValueError("history is not a list of texts")
    if not isinstance(stored["origin"], (str, type(None))):
        raise ValueError("origin is not a path")
