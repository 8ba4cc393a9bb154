"""What all request bodies share: strict types, null as absent, refusals that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from .errors import ApiError
from .json_body import JsonObject, json_type, read_json, run_if_large


def _whole(value: object) -> object:
    """JSON does not tell 1.0 from 1, so a whole number counts as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
Integers = Annotated[list[Integer], FailFast()]
BodyType = TypeVar("BodyType", bound="Body")


class Body(BaseModel):
    """Base of all bodies: unknown fields are errors, null means absent, "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    refused: ClassVar[Mapping[str, Refused]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:  # whatever JSON holds
        if not isinstance(data, dict):
            return data
        for name in data:  # here, since pydantic would write an error for each of a million
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", "unknown", {"name": name})
        return {key: value for key, value in data.items() if value is not None}


class Refused:
    """A field that we cannot honour; `neutral` are the values that ask for nothing."""

    def __init__(self, why: str, *neutral: object) -> None:
        self.why = why
        self.neutral = neutral

    def refuses(self, value: object) -> bool:
        """Whether this value asks for something."""
        return not any(type(value) is type(good) and value == good for good in self.neutral)

    def __call__(self) -> str:
        if not self.neutral:
            return self.why
        known = " or ".join(repr(good) for good in self.neutral)
        return f"{self.why} Leave it out or send {known}."


class StreamOptions(Body):
    """`stream_options`: usage at the end, or running in every chunk as vLLM has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationBody(Body):
    """Fields that `/v1/chat/completions` and `/v1/completions` have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Integer = 1
    max_tokens: Integer | None = None
    min_tokens: Integer = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Integer = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, Any] = Field(default_factory=dict)  # checked with the model's vocabulary
    seed: Integer | None = None
    stop: str | list[Any] | None = None  # items are checked with the limits
    stop_token_ids: Integers = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: Integer = 0
    # accepted, and change nothing here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    request_id: str | None = None  # echoed nowhere and never an engine id; see X-Request-Id
    session_id: str | None = None


@cache
def body_schema(body_type: type[Body]) -> dict[str, Any]:  # JSON Schema
    """The body's schema in the place where OpenAPI wants it, references filled in."""
    schema = body_type.model_json_schema()
    parts = schema.pop("$defs", {})

    def filled(node: Any) -> Any:  # JSON
        if isinstance(node, list):
            return [filled(item) for item in node]
        if not isinstance(node, dict):
            return node
        reference = node.get("$ref")
        if isinstance(reference, str):
            return filled(parts[reference.rsplit("/", 1)[-1]])
        return {key: filled(value) for key, value in node.items()}

    content = {"application/json": {"schema": filled(schema)}}
    return {"requestBody": {"required": True, "content": content}}


async def read_request(body_type: type[BodyType], request: Request, max_bytes: int) -> BodyType:
    """A request's body, read and checked. Raises `ApiError`."""
    data = await read_json(request, max_bytes)
    num_bytes = int(request.headers.get("content-length", max_bytes))
    return await run_if_large(num_bytes, lambda: parse(body_type, data))


def parse(body_type: type[BodyType], data: JsonObject) -> BodyType:
    """`data` as a `body_type`. Raises `ApiError` 400 that names the first wrong field."""
    kept: JsonObject = {}
    for name, value in data.items():
        refused = body_type.refused.get(name)
        if refused is None:
            kept[name] = value
        elif value is not None and refused.refuses(value):
            raise ApiError(
                400,
                f"{name} is not supported: {refused()}",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return body_type.model_validate(kept)
    except ValidationError as error:
        raise _explain(error, body_type) from None


def _explain(error: ValidationError, body_type: type[Body]) -> ApiError:
    details = error.errors(include_url=False)
    first = details[0]
    if first["type"] == "unknown_field":
        param = ".".join([*map(str, first["loc"]), first.get("ctx", {})["name"]])[:80]
        known = ", ".join(sorted(body_type.model_fields))
        message = f"{param} is no field of this request. Known fields: {known}."
        return ApiError(400, message, param=param, code="unknown_parameter")
    if first["type"] == "missing":
        param = _path(first["loc"])
        return ApiError(400, f"{param} is required.", param=param, code="missing_parameter")
    field = [item for item in details if item["loc"][:1] == first["loc"][:1]]
    deepest = max(field, key=lambda item: len(_path(item["loc"])))  # of a union's members
    param = _path(deepest["loc"])
    wanted = _wanted([item for item in field if _path(item["loc"]) == param])
    found = found_value(deepest["input"])
    return ApiError(400, f"{param} is {found}; {wanted}.", param=param, code="invalid_type")


def _wanted(details: list[Any]) -> str:  # pydantic's error dictionaries
    texts = [
        item["msg"].removeprefix("Input should be ").removeprefix("a valid ") for item in details
    ]
    return "it must be " + " or ".join(dict.fromkeys(texts))


def _path(loc: tuple[int | str, ...]) -> str:
    """`("stop", "list[str]", 0)` as `stop[0]`: pydantic's names of union members are left out."""
    path = str(loc[0]) if loc else ""
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "bool", "float"):
            path += f".{part}"
    return path


def found_value(value: object) -> str:
    """A short form of what a client sent, safe to quote back."""
    if isinstance(value, (list, dict)):
        return json_type(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({json_type(value)})"
