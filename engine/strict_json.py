"""JSON as the standard defines it (RFC 8259), for files and standard output.

Python also writes NaN and Infinity, which most other readers refuse with the whole line.
"""

import json
from typing import Any


def dumps(content: Any, *, indent: int | None = None) -> str:
    """Return `content` as JSON text. A number that is not finite becomes null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)
