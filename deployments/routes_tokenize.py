"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes, at the root and under /v1."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..runtime.errors import RequestError
from .gateway import Gateway, ServedModel
from .json_response import json_response
from .prompts import Prompt
from .routes_generate import require_template
from .schema import body_schema, read_request
from .schema_completion import DetokenizeBody, TokenizeBody
from .schema_refused import TOOLS_WHY
from .token_logprobs import token_name


def tokenize_routes(gateway: Gateway) -> APIRouter:
    """Text to ids and back."""
    router = APIRouter()

    async def tokenize(request: HttpRequest) -> Response:
        body = await read_request(TokenizeBody, request, gateway.settings.max_body_bytes)
        model = gateway.find_model(body.model)
        gateway.require_workers(model)
        prompt = await _read(model, body)
        names = [token_name(model.prompts.tokenizer, token_id) for token_id in prompt.ids]
        return json_response(
            {
                "count": len(prompt.ids),
                "max_model_len": model.max_model_len,
                "tokens": list(prompt.ids),
                "token_strs": names if body.return_token_strs else None,
            }
        )

    async def detokenize(request: HttpRequest) -> Response:
        body = await read_request(DetokenizeBody, request, gateway.settings.max_body_bytes)
        model = gateway.find_model(body.model)
        tokenizer = model.prompts.tokenizer
        for number, token_id in enumerate(body.tokens):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise RequestError(
                    f"tokens[{number}] is {token_id}; "
                    f"token ids are 0 to {tokenizer.vocab_size - 1}",
                    f"tokens[{number}]",
                )
        text = await model.prompts.run(
            lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return json_response({"prompt": text})

    for prefix in ("", "/v1"):
        for name, endpoint, body_type in (
            ("tokenize", tokenize, TokenizeBody),
            ("detokenize", detokenize, DetokenizeBody),
        ):
            extra = body_schema(body_type)
            router.add_api_route(
                f"{prefix}/{name}", endpoint, methods=["POST"], openapi_extra=extra
            )
    return router


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
