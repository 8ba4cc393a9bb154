"""Requests, and ids to cancel, on their way to the thread that steps."""

from __future__ import annotations

from collections import deque

from .errors import RequestError
from .request import Request


class Inbox:
    """Filled from any thread, emptied by the engine's. It knows a request until that has ended."""

    def __init__(self, *, capacity: int, vocab_size: int) -> None:
        self.capacity = capacity  # requests that may run or wait
        self._vocab_size = vocab_size
        self._items: deque[Request | str] = deque()  # requests, and ids to cancel, in order
        self._known: set[str] = set()  # ids submitted and not yet ended

    @property
    def num_known(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._known)

    @property
    def has_room(self) -> bool:
        """Whether the finite queue takes another request."""
        return len(self._known) < self.capacity

    @property
    def has_items(self) -> bool:
        """Whether there is something to take."""
        return bool(self._items)

    def check(self, request: Request) -> None:
        """Raise RequestError when the request's own numbers are wrong."""
        if request.id in self._known:
            raise RequestError(f"a request with id {request.id!r} is running already", "id")
        if not request.prompt_ids:
            raise RequestError("the prompt has no token; send at least one", "prompt")
        vocab = self._vocab_size
        for name, ids in (("prompt", request.prompt_ids), ("output_ids", request.output_ids)):
            if min(ids, default=0) < 0 or max(ids, default=0) >= vocab:
                wrong = next(i for i in ids if not 0 <= i < vocab)
                raise RequestError(
                    f"{name} holds token id {wrong}; this model's ids are 0 to {vocab - 1}", name
                )
        biased = [i for i in request.sampling.logit_bias if not 0 <= i < vocab]
        if biased:
            raise RequestError(
                f"logit_bias names token id {biased[0]}; this model's ids are 0 to {vocab - 1}",
                "logit_bias",
            )

    def put(self, request: Request) -> None:
        """Queue a request."""
        self._known.add(request.id)
        self._items.append(request)

    def cancel(self, request_id: str) -> None:
        """Queue the end of a request; an unknown or ended one is left alone."""
        if request_id in self._known:
            self._items.append(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id has been submitted and has not ended."""
        return request_id in self._known

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._known.discard(request_id)

    def take(self) -> Request | str | None:
        """The oldest request or id to cancel; None when there is none."""
        return self._items.popleft() if self._items else None

    def num_tokens(self) -> int:
        """Tokens of the requests that were not taken yet."""
        inbox = [item for item in tuple(self._items) if isinstance(item, Request)]
        return sum(len(request.prompt_ids) + len(request.output_ids) for request in inbox)
