"""A JSON answer."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(content: object, status: int = 200) -> Response:
    """`content` as a JSON body."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
