"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..runtime.errors import QueueFullError, RequestError
from ..runtime.request import Request
from .answer import Answer
from .answer_format import AnswerHead
from .caller import Caller, caller_of
from .chat_format import ChatFormat
from .completion_format import CompletionFormat
from .gateway import Gateway
from .generation import Generation
from .json_body import json_type
from .prompts import Prompt, count_prompts
from .route_wish import RouteWish, read_wish
from .sampling import AnswerRules, answer_rules, check_context
from .schema import GenerationBody, body_schema, found_value, read_request
from .schema_chat import ChatBody
from .schema_completion import CompletionBody
from .schema_refused import TOOLS_WHY
from .seats import Seat
from .served_model import ServedModel
from .stream import GenerationResponse

logger = logging.getLogger("polypath.http")


def generation_routes(gateway: Gateway) -> APIRouter:
    """The two endpoints that make text."""
    router = APIRouter()
    router.add_api_route(
        "/v1/chat/completions",
        _Chat(gateway).answer,
        methods=["POST"],
        openapi_extra=body_schema(ChatBody),
    )
    router.add_api_route(
        "/v1/completions",
        _Completion(gateway).answer,
        methods=["POST"],
        openapi_extra=body_schema(CompletionBody),
    )
    return router


class _Chat:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._warned: set[str] = (
            set()
        )  # models whose template drops tool calls, said once in the log

    async def answer(self, request: HttpRequest) -> Response:
        arrived_s = time.monotonic()
        gateway = self._gateway
        body = await read_request(ChatBody, request, gateway.settings.max_body_bytes)
        caller, wish = caller_of(request), wish_of(request, gateway)
        model = caller.find_model(gateway, body.model)
        gateway.require_workers(model)
        check_tools(body)
        rules = answer_rules(body, model.vocab_size, gateway.settings)
        require_template(model)
        check_capacity(model, 1, rules.num_choices)
        with take_seat(gateway, model, rules.num_choices) as seat:
            prompt, has_tool_calls = await model.prompts.read_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                template_kwargs=body.chat_template_kwargs,
                max_model_len=model.max_model_len,
            )
            max_tokens = rules.sampling.max_tokens
            check_context(len(prompt.ids), max_tokens, model.max_model_len, "messages")
            answers = make_answers(model, [prompt], rules, body, caller)
            await reserve(caller, model, [prompt], rules, answers)
            generation = Generation(
                gateway, model, answers, arrived_s=arrived_s, wish=wish, seat=seat
            )
            head = AnswerHead(
                "chatcmpl",
                generation,
                model.prompts.tokenizer,
                stream_options=body.stream_options,
                warnings=self._warnings(model) if has_tool_calls else (),
            )
            form = ChatFormat(head, has_logprobs=body.logprobs)
            return GenerationResponse(generation, head, form, is_stream=body.stream)

    def _warnings(self, model: ServedModel) -> list[str]:
        template = model.prompts.chat_template
        if template is None or template.supports_tool_calls:
            return []
        warning = (
            f"the chat template of {model.name} knows no tool calls: "
            "those of the history are left out of the prompt"
        )
        if model.name not in self._warned:
            self._warned.add(model.name)
            logger.warning("%s", warning)
        return [warning]


class _Completion:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, request: HttpRequest) -> Response:
        arrived_s = time.monotonic()
        gateway = self._gateway
        body = await read_request(CompletionBody, request, gateway.settings.max_body_bytes)
        caller, wish = caller_of(request), wish_of(request, gateway)
        model = caller.find_model(gateway, body.model)
        gateway.require_workers(model)
        if body.best_of is not None and body.best_of != body.n:
            raise RequestError(
                f"best_of is {body.best_of} and n is {body.n}; answers are not ranked, "
                "so best_of must equal n or be left out",
                "best_of",
            )
        rules = answer_rules(body, model.vocab_size, gateway.settings)
        num_answers = count_prompts(body.prompt) * rules.num_choices
        check_capacity(model, count_prompts(body.prompt), rules.num_choices)
        with take_seat(gateway, model, num_answers) as seat:
            prompts = await model.prompts.read_prompts(
                body.prompt,
                add_special_tokens=body.add_special_tokens,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                needs_text=body.echo,
            )
            for number, prompt in enumerate(prompts):
                param = f"prompt[{number}]" if len(prompts) > 1 else "prompt"
                check_context(
                    len(prompt.ids), rules.sampling.max_tokens, model.max_model_len, param
                )
            answers = make_answers(model, prompts, rules, body, caller)
            await reserve(caller, model, prompts, rules, answers)
            generation = Generation(
                gateway, model, answers, arrived_s=arrived_s, wish=wish, seat=seat
            )
            options = body.stream_options
            head = AnswerHead("cmpl", generation, model.prompts.tokenizer, stream_options=options)
            has_logprobs = body.logprobs is not None
            form = CompletionFormat(head, has_logprobs=has_logprobs, has_echo=body.echo)
            return GenerationResponse(generation, head, form, is_stream=body.stream)


def take_seat(gateway: Gateway, model: ServedModel, num_answers: int) -> Seat:
    """Places in the queue, before prompts are read: a full one refuses at once. Raises
    `QueueFullError`.
    """
    try:
        return model.line.enter(num_answers)
    except QueueFullError:
        gateway.metrics.count_refused(model.name, "queue_full")
        raise


def wish_of(request: HttpRequest, gateway: Gateway) -> RouteWish:
    """What the headers ask of the router; a deadline is a goal too. Raises `RequestError`."""
    settings = gateway.settings
    wish = read_wish(
        request.headers, compares_policies=settings.compares_policies, goal_s=settings.goal_s
    )
    deadline_s: float | None = request.scope.get("state", {}).get("deadline_s")
    if deadline_s is None:
        return wish
    left_s = max(0.0, deadline_s - time.monotonic())
    return replace(wish, goal_s=left_s if wish.goal_s is None else min(wish.goal_s, left_s))


def make_answers(
    model: ServedModel,
    prompts: list[Prompt],
    rules: AnswerRules,
    body: GenerationBody,
    caller: Caller,
) -> list[Answer]:
    """The answers of one API request, each with its engine request. Raises `ApiError` 403 for a
    priority that the caller may not have.
    """
    priority = caller.priority(body.priority if "priority" in body.model_fields_set else None)
    answers: list[Answer] = []
    name = secrets.token_hex(8)
    for number, prompt in enumerate(prompts):
        for choice in range(rules.num_choices):
            engine_request = Request(
                id=f"{name}-{len(answers)}",
                prompt_ids=prompt.ids,
                sampling=rules.of(number, choice),
                priority=priority,
            )
            answers.append(
                Answer(len(answers), prompt, engine_request, rules, model.prompts.tokenizer)
            )
    return answers


async def reserve(
    caller: Caller,
    model: ServedModel,
    prompts: list[Prompt],
    rules: AnswerRules,
    answers: list[Answer],
) -> None:
    """Set aside tokens of the caller's rate: the prompts, and the longest answers they may get."""
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    limit = rules.sampling.max_tokens
    rooms = (
        model.max_model_len - len(answer.prompt.ids) if limit is None else limit
        for answer in answers
    )
    await caller.reserve(
        num_prompt,
        sum(rooms),
        lambda: sum(answer.num_tokens for answer in answers),
        is_named=limit is not None,
    )


def check_capacity(model: ServedModel, num_prompts: int, num_choices: int) -> None:
    """Raise `RequestError` when the answers are more than any worker runs and queues."""
    num_answers = num_prompts * num_choices
    if num_answers > model.capacity:
        raise RequestError(
            f"{num_prompts} prompts with n {num_choices} are {num_answers} answers at once; "
            f"a worker holds {model.capacity}. Split the request.",
            "n" if num_prompts == 1 else "prompt",
        )


def require_template(model: ServedModel) -> None:
    """Raise `RequestError` when a model cannot chat."""
    if model.prompts.chat_template is None:
        raise RequestError(
            f"{model.name} has no chat template, so it cannot chat; send a prompt to "
            "/v1/completions, or have the operator start it with --chat-template FILE",
            "messages",
            "no_chat_template",
        )


def check_tools(body: ChatBody) -> None:
    """Tools are not built: an empty list, or the choice to use none, can be honoured."""
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice is {found_value(choice)}; "
            "it must be 'none', 'auto', 'required' or an object",
            "tool_choice",
        )
    if choice == "required" or isinstance(choice, dict):
        found = "'required'" if choice == "required" else json_type(choice)
        raise RequestError(
            f"tool_choice is {found}, but {TOOLS_WHY} Leave it out.",
            "tool_choice",
            "unsupported_parameter",
        )
    if body.tools and choice != "none":
        raise RequestError(
            f"tools has {len(body.tools)} entries: {TOOLS_WHY} "
            "Leave it out, or send tool_choice 'none'.",
            "tools",
            "unsupported_parameter",
        )
