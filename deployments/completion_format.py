"""Answers of `/v1/completions`: `text_completion` bodies and streams, with `echo`."""

from __future__ import annotations

from collections.abc import Sequence

from .answer import Answer, Piece, prompt_entries
from .answer_format import AnswerHead
from .json_body import JsonObject
from .token_logprobs import completion_logprobs, join_completion_logprobs

KIND = "text_completion"


class CompletionFormat:
    """Every chunk carries text; the last of a choice has its finish reason and the text ""."""

    def __init__(self, head: AnswerHead, *, has_logprobs: bool, has_echo: bool) -> None:
        self._head = head
        self._has_logprobs = has_logprobs
        self._has_echo = has_echo

    def chunks(self, piece: Piece) -> list[JsonObject]:
        """The echoed prompt when an answer begins, then what the piece adds."""
        answer = self._head.generation.answers[piece.index]
        text = piece.text
        logprobs = self._logprobs(answer, piece)
        if piece.is_first and self._has_echo:
            text = answer.prompt.text + text
            logprobs = self._with_prompt(answer, logprobs)
        is_empty = not text and not piece.tokens and piece.finish_reason is None
        if is_empty and not self._head.running_usage:
            return []
        choice: JsonObject = {
            "index": piece.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        return [self._head.chunk(KIND, choice, piece)]

    def _logprobs(self, answer: Answer, piece: Piece) -> JsonObject | None:
        if not self._has_logprobs:
            return None
        shift = len(answer.prompt.text) if self._has_echo else 0
        return completion_logprobs(piece.tokens, self._head.tokenizer, shift=shift)

    def _with_prompt(self, answer: Answer, logprobs: JsonObject | None) -> JsonObject | None:
        if logprobs is None:
            return None
        assert answer.prompt_logprobs is not None, "the engine sends them with the first output"
        tokenizer = self._head.tokenizer
        entries = prompt_entries(answer.prompt, answer.prompt_logprobs, tokenizer)
        return join_completion_logprobs(completion_logprobs(entries, tokenizer), logprobs)

    def body(self, pieces: Sequence[Sequence[Piece]]) -> JsonObject:
        """The unstreamed answer: its own chunks put together."""
        choices: list[JsonObject] = []
        for answer in self._head.generation.answers:
            own = pieces[answer.index]
            tokens = tuple(entry for piece in own for entry in piece.tokens)
            text = "".join(piece.text for piece in own)
            logprobs = self._logprobs(answer, Piece(answer.index, tokens=tokens))
            if self._has_echo:
                text = answer.prompt.text + text
                logprobs = self._with_prompt(answer, logprobs)
            choices.append(
                {
                    "index": answer.index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": answer.finish_reason,
                }
            )
        return self._head.fields(KIND, choices)
