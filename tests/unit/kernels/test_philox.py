"""Philox against the known answers that Random123 publishes, and the uniform numbers from it."""

from __future__ import annotations

import pytest

from polypath.kernels.philox import philox4x32, uniform

_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (_ONES, _ONES, _ONES, _ONES),
            (_ONES, _ONES),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_is_the_first_two_words_of_the_counter() -> None:
    low, high, _, _ = philox4x32((7, 0, 3, 0), (0x89ABCDEF, 0x01234567))
    assert uniform(0x0123456789ABCDEF, 3, 7) == ((high << 32 | low) >> 11) / 2**53


def test_every_part_of_the_key_counts() -> None:
    parts = [(0, 0, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1 << 32)]
    assert len({uniform(*part) for part in parts}) == len(parts)


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert uniform(2**64, 0, 0) == uniform(0, 0, 0)
    assert uniform(-(2**63), 0, 0) == uniform(2**63, 0, 0)


def test_stays_below_one_and_fills_the_interval_evenly() -> None:
    numbers = [uniform(seed, 0, position) for seed in range(20) for position in range(500)]
    assert all(0.0 <= x < 1.0 for x in numbers)
    tenths = [sum(int(x * 10) == tenth for x in numbers) for tenth in range(10)]
    assert all(abs(count - 1000) < 5 * 30 for count in tenths)  # five standard deviations
