"""JSON without NaN and Infinity."""

import json
import math

import numpy as np
import pytest

from engine.checkpoint import json_text
from tests.results import strictly_parsed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_become_null(value: float) -> None:
    content = {"a": value, "b": [1.5, (value, {"c": value})], "d": "NaN", "e": True, "f": 2**70}
    with pytest.raises(ValueError, match=r"NaN|Infinity"):
        strictly_parsed(json.dumps(content))
    expected = {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": True, "f": 2**70}
    assert strictly_parsed(json_text(content)) == expected
    assert strictly_parsed(json_text(content, indent=2)) == expected

    finite = {"x": [0.1, -0.0, 3e38, None, "ä", {"y": ()}], "z": 7}
    assert json_text(finite) == json.dumps(finite)
