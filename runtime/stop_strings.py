"""Finding stop strings in text that arrives in pieces, and holding back what may be the beginning
of one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The stop string that completes first ends the text (of two that end together, the longer),
    however it is cut.

    One Knuth-Morris-Pratt automaton a stop string: linear in the text, and the held text is the
    longest that may begin one.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would match at once; the edge refuses it"
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        # characters of each stop that the text now ends with
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to give out, the stop string found). After a stop nothing more may be pushed."""
        if not self._stops:
            return text, None
        for number, character in enumerate(text):
            found = self._step(character)
            if found is not None:
                whole = self._held + text[: number + 1]
                self._held = ""
                return whole if self._include_stop else whole[: -len(found)], found
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :] if keep else ""
        return whole[: len(whole) - keep], None

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found: str | None = None
        for index, stop in enumerate(self._stops):
            length, fallback = self._matched[index], self._fallbacks[index]
            while length and stop[length] != character:
                length = fallback[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
            self._matched[index] = length
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each prefix the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
