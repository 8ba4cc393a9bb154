"""Answers of `/v1/chat/completions`: bodies and streams of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from .answer import Piece
from .answer_format import AnswerHead
from .json_body import JsonObject
from .token_logprobs import chat_logprobs

CHUNK = "chat.completion.chunk"


class ChatFormat:
    """First chunk: the role. Last chunk of a choice: its finish reason and an empty delta."""

    def __init__(self, head: AnswerHead, *, has_logprobs: bool) -> None:
        self._head = head
        self._has_logprobs = has_logprobs

    def chunks(self, piece: Piece) -> list[JsonObject]:
        """The role when an answer begins, then what the piece adds."""
        chunks: list[JsonObject] = []
        if piece.is_first:
            role: JsonObject = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(piece, role, logprobs=None))
        if piece.finish_reason is not None:
            shows = any(not entry.is_end for entry in piece.tokens)
            logprobs = self._logprobs(piece) if shows else None
            chunks.append(self._chunk(piece, {}, logprobs))
        elif piece.text or piece.tokens or (self._head.running_usage and not piece.is_first):
            chunks.append(self._chunk(piece, {"content": piece.text}, self._logprobs(piece)))
        return chunks

    def _logprobs(self, piece: Piece) -> JsonObject | None:
        if not self._has_logprobs:
            return None
        return chat_logprobs(piece.tokens, self._head.tokenizer)

    def _chunk(self, piece: Piece, delta: JsonObject, logprobs: JsonObject | None) -> JsonObject:
        choice: JsonObject = {
            "index": piece.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        return self._head.chunk(CHUNK, choice, piece)

    def body(self, pieces: Sequence[Sequence[Piece]]) -> JsonObject:
        """The unstreamed answer."""
        choices: list[JsonObject] = []
        for answer in self._head.generation.answers:
            own = pieces[answer.index]
            text = "".join(piece.text for piece in own)
            tokens = [entry for piece in own for entry in piece.tokens]
            choice: JsonObject = {
                "index": answer.index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": answer.finish_reason,
            }
            if self._has_logprobs:
                choice["logprobs"] = chat_logprobs(tokens, self._head.tokenizer)
            choices.append(choice)
        return self._head.fields("chat.completion", choices)
