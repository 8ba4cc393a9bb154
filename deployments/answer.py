"""One answer in the making: tokens become text, stop strings are watched, counts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..runtime.detokenizer import IncrementalDetokenizer
from ..runtime.request import FinishReason, Request, RequestOutput, StepCount, TokenLogprob

if TYPE_CHECKING:
    from ..runtime.tokenizer import Tokenizer
    from .prompts import Prompt
    from .sampling import AnswerRules


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its log-probability and where its text begins in the answer."""

    token_id: int
    logprob: TokenLogprob | None  # None: the first token of a prompt
    offset: int  # characters before it
    is_end: bool = False  # an end token: its text is not part of the answer


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine step adds to one answer. The last one has a `finish_reason` and no text."""

    index: int
    text: str = ""
    tokens: tuple[TokenEntry, ...] = ()  # those whose text begins in the text given out so far
    is_first: bool = False
    finish_reason: str | None = None
    num_tokens: int = 0  # generated for this answer up to now


@dataclass(slots=True)
class Answer:
    """State of one answer. `index` = prompt number x n + answer number."""

    index: int
    prompt: Prompt
    request: Request
    rules: AnswerRules
    tokenizer: Tokenizer
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    steps: tuple[StepCount, ...] = ()
    is_stopped: bool = False  # by a stop string: the engine does not know yet
    _num_chars: int = 0  # of text given out
    _is_begun: bool = False
    _detokenizer: IncrementalDetokenizer = field(init=False)
    _trail: TokenTrail | None = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            stop=self.rules.stop,
            include_stop=self.rules.include_stop,
            skip_special_tokens=self.rules.skip_special_tokens,
            continues=self.rules.continues,
        )
        wants_logprobs = self.request.sampling.logprobs is not None
        self._trail = TokenTrail(self.tokenizer, self.rules) if wants_logprobs else None

    def take(self, output: RequestOutput) -> list[Piece]:
        """Turn a step's tokens into pieces; the last output also gives the closing piece."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        ends = output.finish_reason is FinishReason.STOP
        hidden = 1 if ends and output.token_ids and not self.rules.include_stop else 0
        shown = output.token_ids[: len(output.token_ids) - hidden]
        delta = self._detokenizer.push(shown)
        self.is_stopped = delta.stopped_by is not None
        num_new = delta.num_tokens_used if self.is_stopped else len(output.token_ids)
        self.num_tokens += num_new
        if self._trail is not None:
            self._trail.add(output.token_ids[:num_new], output.logprobs, has_end_token=ends)
        pieces = [self._piece(delta.text)]
        if output.finish_reason is not None and not self.is_stopped:
            self.steps = output.steps
            pieces += self._flush(str(output.finish_reason.value))
        return pieces

    def _flush(self, reason: str) -> list[Piece]:
        """Give out what was held back; a stop string may still complete in it."""
        delta = self._detokenizer.finish()
        if delta.stopped_by is not None:
            reason, self.is_stopped = FinishReason.STOP.value, True
        pieces = [self._piece(delta.text)] if delta.text else []
        return [*pieces, self.close(reason)]

    def close(self, reason: str) -> Piece:
        """The last piece, with the tokens that show no text of their own."""
        self.finish_reason = reason
        rest: tuple[TokenEntry, ...] = ()
        if self._trail is not None:
            rest = self._trail.release(self._num_chars, is_last=not self.is_stopped)
        return Piece(self.index, tokens=rest, finish_reason=reason, num_tokens=self.num_tokens)

    def _piece(self, text: str) -> Piece:
        self._num_chars += len(text)
        tokens = self._trail.release(self._num_chars) if self._trail is not None else ()
        is_first, self._is_begun = not self._is_begun, True
        return Piece(self.index, text, tokens, is_first=is_first, num_tokens=self.num_tokens)


class TokenTrail:
    """Tokens with the place of their text, kept until that text has been given out.

    Text may be held back (half a character, the beginning of a stop string), and its tokens with
    it, so that the tokens returned are those of the text returned, however it is cut into chunks.
    """

    def __init__(self, tokenizer: Tokenizer, rules: AnswerRules) -> None:
        self._plain = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=rules.skip_special_tokens,
            continues=rules.continues,
        )
        self._num_chars = 0
        self._held: list[TokenEntry] = []

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, has_end_token: bool
    ) -> None:
        """Append tokens; `has_end_token`: the last of them ended the answer."""
        for number, token_id in enumerate(token_ids):
            is_end = has_end_token and number == len(token_ids) - 1
            self._held.append(TokenEntry(token_id, logprobs[number], self._num_chars, is_end))
            self._num_chars += len(self._plain.push([token_id]).text)

    def release(self, num_chars: int, *, is_last: bool = False) -> tuple[TokenEntry, ...]:
        """The tokens whose text begins before `num_chars`; at an answer's end all that are left."""
        count = 0
        while count < len(self._held) and (is_last or self._held[count].offset < num_chars):
            count += 1
        released, self._held = self._held[:count], self._held[count:]
        return tuple(released)


def prompt_entries(
    prompt: Prompt, logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[TokenEntry]:
    """The tokens of a prompt for `echo`; a first token that the tokenizer added has no text."""
    plain = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    entries: list[TokenEntry] = []
    num_chars = 0
    for number, token_id in enumerate(prompt.ids):
        entries.append(TokenEntry(token_id, logprobs[number], min(num_chars, len(prompt.text))))
        is_added = number == 0 and token_id == tokenizer.bos_id
        if is_added and not prompt.text.startswith(tokenizer.token_text(token_id)):
            continue
        num_chars += len(plain.push([token_id]).text)
    return entries
