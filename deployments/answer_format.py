"""What both endpoints' answers share: the head of every chunk, usage, and the field `polypath`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .answer import Piece
from .json_body import JsonObject

if TYPE_CHECKING:
    from ..runtime.tokenizer import Tokenizer
    from .generation import Generation
    from .schema import StreamOptions
    from .served_worker import Worker


class AnswerFormat(Protocol):
    """How pieces become the chunks of a stream, or one body."""

    def chunks(self, piece: Piece) -> list[JsonObject]:
        """The chunks that one piece makes; often one, none when there is nothing to show."""
        ...

    def body(self, pieces: Sequence[Sequence[Piece]]) -> JsonObject:
        """The whole unstreamed answer, from the pieces of each choice."""
        ...


class AnswerHead:
    """The fields that all chunks of one answer have in common, and its accounts."""

    def __init__(
        self,
        prefix: str,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        stream_options: StreamOptions | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.generation = generation
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.include_usage = bool(stream_options and stream_options.include_usage)
        self.running_usage = bool(stream_options and stream_options.continuous_usage_stats)
        self._warnings = list(warnings)
        self._num_tokens = [0] * len(generation.answers)

    def _worker(self) -> Worker:
        worker = self.generation.worker
        assert worker is not None, "what speaks has been placed"
        return worker

    def fields(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        """A chunk or body of object `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.generation.model.name,
            "system_fingerprint": self._worker().fingerprint,
            "choices": choices,
        }

    def chunk(self, kind: str, choice: JsonObject, piece: Piece) -> JsonObject:
        """A chunk with one choice; `usage` is there when the client asked for it."""
        self._num_tokens[piece.index] = piece.num_tokens
        chunk = self.fields(kind, [choice])
        if self.running_usage:
            chunk["usage"] = self.usage(sum(self._num_tokens))
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def usage(self, num_generated: int | None = None) -> JsonObject:
        """Token counts; a prompt counts once however many answers it gets."""
        answers = self.generation.answers
        firsts = [answer for answer in answers if answer.request.sampling.choice == 0]
        num_prompt = sum(len(answer.prompt.ids) for answer in firsts)
        if num_generated is None:
            num_generated = sum(answer.num_tokens for answer in answers)
        num_cached = sum(answer.cached_tokens for answer in firsts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def served(self) -> JsonObject:
        """The field `polypath`: what really served this answer."""
        worker = self._worker()
        served: JsonObject = {
            "worker": worker.id,
            "plan": worker.fingerprint,
            "steps": self.generation.steps(),
            "trail": self.generation.trail(),
        }
        if resumed := self.generation.resumed():
            served["resumed"] = resumed
        seeds = {answer.request.sampling.seed for answer in self.generation.answers}
        if len(seeds) == 1:
            served["seed"] = next(iter(seeds))
        if self._warnings:
            served["warnings"] = self._warnings
        return served
