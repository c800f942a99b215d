"""JSON as the standard defines it (RFC 8259), for files and standard output.

Python also writes NaN and Infinity, which are no JSON: JavaScript, jq and most other readers refuse
the whole line.
"""

import json
from typing import Any


def dumps(content: Any, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """Return `content` as JSON text. A number that is not finite becomes null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent, ensure_ascii=ascii_only)
