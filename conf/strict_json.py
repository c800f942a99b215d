"""JSON as the standard defines it (RFC 8259), for files and standard output.

Python also writes NaN and Infinity, which are no JSON: JavaScript, jq and most other readers refuse
the whole line.
"""

import json
import math
from typing import Any


def dumps(content: Any, *, indent: int | None = None) -> str:
    """Return `content` as JSON text. A number that is not finite becomes null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content
