"""Libraries that only tests use, to compare results with theirs."""

import importlib
import importlib.util
from types import ModuleType

import pytest


def timm_module(name: str) -> ModuleType:
    """Import a module of timm, or skip the test if timm is not installed."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    return importlib.import_module(f"timm.{name}")
