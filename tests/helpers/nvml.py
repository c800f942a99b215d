"""NVML in tests: its answers are set, and its calls are counted."""

from collections.abc import Callable
from typing import Any


class NvmlError(Exception):
    pass


class Nvml:
    """Replaces NVML and the driver. An answer may be an error, or a function of the arguments."""

    NVMLError = NvmlError

    def __init__(self, **answers: Any) -> None:
        self.calls: list[str] = []
        self.answers = {"nvmlInit": None} | answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.calls.append(name)
            answer = self.answers[name]
            answer = answer(*arguments) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask
