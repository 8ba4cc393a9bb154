"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes, at the root and under /v1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..runtime.errors import RequestError
from .caller import caller_of
from .gateway import Gateway
from .json_response import json_response
from .prompts import Prompt, PromptReader
from .routes_generate import require_template
from .sampling import check_prompt_len
from .schema import Body, body_schema, read_request
from .schema_completion import DetokenizeBody, TokenizeBody
from .schema_refused import TOOLS_WHY
from .served_model import ServedModel
from .token_logprobs import token_name


def tokenize_routes(gateway: Gateway) -> APIRouter:
    """Text to ids and back."""
    router = APIRouter()

    async def tokenize(request: HttpRequest) -> Response:
        body = await read_request(TokenizeBody, request, gateway.settings.max_body_bytes)
        model = caller_of(request).find_model(gateway, body.model)
        gateway.require_workers(model)
        with model.prompts.aside():
            prompt = await _read(model, body)
        names = None
        if body.return_token_strs:
            names = [token_name(model.prompts.tokenizer, token_id) for token_id in prompt.ids]
        return json_response(
            {
                "count": len(prompt.ids),
                "max_model_len": model.max_model_len,
                "tokens": list(prompt.ids),
                "token_strs": names,
            }
        )

    async def detokenize(request: HttpRequest) -> Response:
        body = await read_request(DetokenizeBody, request, gateway.settings.max_body_bytes)
        model = caller_of(request).find_model(gateway, body.model)
        gateway.require_workers(model)
        check_prompt_len(len(body.tokens), model.max_model_len, "tokens")
        prompts = model.prompts
        with prompts.aside():
            text = await prompts.run(lambda: _decode(prompts, body.tokens))
        return json_response({"prompt": text})

    _add_under_both(router, "tokenize", tokenize, TokenizeBody)
    _add_under_both(router, "detokenize", detokenize, DetokenizeBody)
    return router


def _add_under_both(
    router: APIRouter,
    name: str,
    endpoint: Callable[[HttpRequest], Awaitable[Response]],
    body_type: type[Body],
) -> None:
    extra = body_schema(body_type)
    for path in (f"/{name}", f"/v1/{name}"):
        router.add_api_route(path, endpoint, methods=["POST"], openapi_extra=extra)


def _decode(prompts: PromptReader, token_ids: Sequence[int]) -> str:
    last = prompts.tokenizer.vocab_size - 1
    for number, token_id in enumerate(token_ids):
        if not 0 <= token_id <= last:
            path = f"tokens[{number}]"
            raise RequestError(f"{path} is {token_id}; token ids are 0 to {last}", path)
    return prompts.tokenizer.decode(token_ids, skip_special_tokens=False)


async def _read(model: ServedModel, body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", "prompt")
    if body.tools:
        raise RequestError(f"tools is not supported: {TOOLS_WHY}", "tools", "unsupported_parameter")
    max_model_len = model.max_model_len
    if body.messages is None:
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
        return await model.prompts.read_text(text, add_special_tokens, max_model_len)
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is not supported with messages: the chat template writes them",
            "add_special_tokens",
        )
    require_template(model)
    prompt, _ = await model.prompts.read_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs,
        max_model_len=max_model_len,
    )
    return prompt
