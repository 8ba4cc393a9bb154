"""Reading JSON objects from a model's files, so that a broken one is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError in one sentence naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}: it is no model folder, or not whole."
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value
