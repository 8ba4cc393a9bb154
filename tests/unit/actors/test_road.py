"""What a road does to strangers, to the silent and the slow, and when one of its ends goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from polypath.actors import road_end
from polypath.actors.frames import (
    MAX_FRAME_BYTES,
    PREFIX,
    VERSION,
    Ask,
    Challenge,
    Frames,
    Proof,
    Submit,
    Welcome,
    encode,
)
from polypath.actors.handshake import is_proved, new_nonce, proof
from polypath.actors.road_address import RoadAddress
from polypath.actors.road_end import Pulse
from polypath.actors.road_link import RoadLink
from polypath.actors.road_server import MAX_STRANGERS, RoadServer
from polypath.actors.worker import Worker
from polypath.runtime.errors import EngineError
from polypath.runtime.request import FinishReason, Request
from polypath.tests.http.live import start_worker
from polypath.tests.link_checks import ask, ids, read, until_idle

pytestmark = pytest.mark.anyio

QUICK = Pulse(beat_s=0.1, max_silent_beats=6, greeting_s=0.5)
PATIENT = Pulse(beat_s=0.1, max_silent_beats=600)


class Road:
    """A server with its address."""

    def __init__(self, server: RoadServer, address: RoadAddress) -> None:
        self.server = server
        self.address = address

    async def link(self) -> RoadLink:
        return await RoadLink.connect(self.address, "gateway-test", QUICK)


@pytest.fixture
async def road(worker: Worker) -> AsyncIterator[Road]:
    server = RoadServer(worker, QUICK)
    yield Road(server, await server.start("127.0.0.1"))
    await server.close()


class Stranger:
    """Raw bytes to a road."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = Frames(Challenge | Welcome, 512)

    @classmethod
    async def connect(cls, road: Road) -> Stranger:
        return cls(*await asyncio.open_connection(road.address.host, road.address.port))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def message(self) -> Challenge | Welcome:
        """The next message, in its own frame."""
        size = int.from_bytes(await self._reader.readexactly(PREFIX), "big")
        self._frames.feed(size.to_bytes(PREFIX, "big") + await self._reader.readexactly(size))
        return self._frames.next()

    async def greet(self, key: str) -> None:
        """Do the handshake as a gateway would."""
        challenge = await self.message()
        assert isinstance(challenge, Challenge)
        nonce = new_nonce()
        mac = proof(bytes.fromhex(key), "gateway", challenge.nonce, nonce)
        self.write(encode(Proof("gateway-raw", nonce, mac)))

    async def is_dropped(self) -> bool:
        """Whether the other side ends the connection soon."""
        try:
            async with asyncio.timeout(3):
                while await self._reader.read(65536):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        self._writer.close()
        return True

    def close(self) -> None:
        self._writer.close()


async def works(road: Road) -> bool:
    """Whether a proper gateway is served."""
    link = await road.link()
    try:
        return len(await read(link, ask(3))) == 3
    finally:
        link.close()


WRONG = {
    "a guess": b"\0" * 32,
    "nothing": b"",
    "too long": b"\0" * 64,
}


@pytest.mark.parametrize("mac", WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_proof_is_refused(
    road: Road, mac: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = await Stranger.connect(road)
    await stranger.message()
    stranger.write(encode(Proof("g", new_nonce(), mac)))
    assert await stranger.is_dropped()
    assert "wrong proof" in caplog.text
    assert road.address.key not in caplog.text
    assert await works(road)


BAD_GREETINGS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": b"\xff\xff\xff\xff",
    "just over the limit": (513).to_bytes(4, "big"),
    "no msgpack": b"\0\0\0\2\xc1\xc1",
    "an empty frame": b"\0\0\0\0",
    "work before the proof": encode(Submit(1, Request(id="r", prompt_ids=(5,)))),
    "a pickle": b"\0\0\0\x0b\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00N.",
    "short nonces": encode(Proof("g", b"x", b"y")),
}


@pytest.mark.parametrize("data", BAD_GREETINGS.values(), ids=BAD_GREETINGS.keys())
async def test_what_is_no_greeting_closes_the_connection(
    road: Road, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = await Stranger.connect(road)
    stranger.write(data)
    assert await stranger.is_dropped()
    assert "a connection to the road was refused" in caplog.text
    assert await works(road)


BAD_MESSAGES = {
    "over the limit": (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    "no msgpack": b"\0\0\0\2\xc1\xc1",
    "a wrong type": encode(Challenge("1", b"x")),
    "wrong fields": b"\0\0\0\4\x93\x04\xa1x",
    "deep nesting": (9000).to_bytes(4, "big") + b"\x92\x04" + b"\x91" * 8998,
    "an attempt twice": 2 * encode(Submit(7, ask(300))),
}


@pytest.mark.parametrize("data", BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
async def test_a_gateway_that_sends_nonsense_is_dropped_and_harms_nobody(
    road: Road, data: bytes
) -> None:
    link = await road.link()
    other = asyncio.ensure_future(read(link, ask(60)))
    stranger = await Stranger.connect(road)
    await stranger.greet(road.address.key)
    assert isinstance(await stranger.message(), Welcome)
    stranger.write(data)
    assert await stranger.is_dropped()
    assert len(await other) == 60
    await until_idle(link)
    link.close()


async def test_an_overheard_proof_is_worth_nothing(road: Road) -> None:
    first, second = await Stranger.connect(road), await Stranger.connect(road)
    heard, other = await first.message(), await second.message()
    assert isinstance(heard, Challenge) and isinstance(other, Challenge)
    assert heard.nonce != other.nonce
    nonce = new_nonce()
    mac = proof(bytes.fromhex(road.address.key), "gateway", heard.nonce, nonce)
    second.write(encode(Proof("g", nonce, mac)))
    assert await second.is_dropped()
    first.close()


def test_neither_side_can_be_made_to_answer_for_the_other() -> None:
    key, ours, theirs = b"k" * 32, new_nonce(), new_nonce()
    assert is_proved(proof(key, "gateway", ours, theirs), key, "gateway", ours, theirs)
    assert not is_proved(proof(key, "worker", ours, theirs), key, "gateway", ours, theirs)
    assert not is_proved(proof(key, "gateway", theirs, ours), key, "gateway", ours, theirs)


async def test_a_stranger_who_says_nothing_is_dropped(
    road: Road, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = await Stranger.connect(road)
    assert await stranger.is_dropped()
    assert "no proof of the key within 0.5 s" in caplog.text


async def test_many_strangers_do_not_keep_a_gateway_out(road: Road) -> None:
    strangers = [await Stranger.connect(road) for _ in range(MAX_STRANGERS + 5)]
    assert await works(road)
    assert await strangers[0].is_dropped()
    for stranger in strangers:
        stranger.close()


async def test_what_does_not_know_the_key_is_not_told_a_prompt(road: Road) -> None:
    impostor = replace(road.address, key="00" * 32)
    with pytest.raises(EngineError, match="cannot be reached"):
        await RoadLink.connect(impostor, "gateway-test")


async def test_an_impostor_of_the_worker_is_found_out() -> None:
    async def pretend(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Challenge(VERSION, new_nonce())) + encode(Welcome("w", b"\0" * 32)))
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    address = RoadAddress(
        version=VERSION, key="11" * 32, machine="", local=None, host=host, port=port
    )
    with pytest.raises(EngineError, match="does not know the worker's key"):
        await RoadLink.connect(address, "gateway-test")
    server.close()
    await server.wait_closed()


def test_another_version_is_refused_by_name(road_address: RoadAddress) -> None:
    said = road_address.to_json() | {"version": "0-old"}
    with pytest.raises(EngineError, match="version 0-old"):
        RoadAddress.from_json(said)
    assert RoadAddress.from_json(road_address.to_json()) == road_address


@pytest.fixture
def road_address() -> RoadAddress:
    return RoadAddress(
        version=VERSION, key="11" * 32, machine="m", local=None, host="127.0.0.1", port=1
    )


async def test_nobody_there_is_an_engine_error(road_address: RoadAddress) -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        await RoadLink.connect(road_address, "gateway-test")


async def test_a_gateway_that_goes_frees_its_requests_and_no_others(road: Road) -> None:
    gone, stays = await road.link(), await road.link()
    reading = [asyncio.ensure_future(read(gone, ask(400)))]
    other = asyncio.ensure_future(read(stays, ask(40)))
    while road.server.num_open() < 2:
        await asyncio.sleep(0.01)
    gone.close()
    with pytest.raises(EngineError, match="the gateway closed the connection"):
        await reading[0]
    assert len(await other) == 40
    await until_idle(stays)
    stays.close()


async def test_a_broken_connection_fails_its_streams_at_once(road: Road) -> None:
    link = await road.link()
    stream = link.generate(ask(400))
    await anext(stream)
    asking = asyncio.ensure_future(link.stats())
    await asyncio.sleep(0)
    for connection in list(road.server._gateways):
        connection.drop("cut by the test")
    with pytest.raises(EngineError, match="died or cannot be reached"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="died or cannot be reached"):
        await asking
    await link.gone()
    with pytest.raises(EngineError, match="died or cannot be reached"):
        await read(link, ask())


async def test_a_silent_gateway_is_dropped_and_its_requests_freed(
    road: Road, worker: Worker
) -> None:
    stranger = await Stranger.connect(road)
    await stranger.greet(road.address.key)
    stranger.write(encode(Submit(1, ask(400))))
    assert await stranger.is_dropped()
    link = await road.link()
    await until_idle(link)
    link.close()


async def test_signs_of_life_keep_an_idle_road_open(road: Road) -> None:
    link = await road.link()
    await asyncio.sleep(1.0)
    assert len(await read(link, ask(2))) == 2
    link.close()


async def test_a_silent_worker_is_given_up(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    link = await road.link()
    monkeypatch.setattr("polypath.actors.road_connection.RoadConnection.send_frame", _mute)
    async with asyncio.timeout(3):
        assert "no sign of life" in await link.gone()


def _mute(self: object, frame: bytes) -> None:
    """Says nothing more."""


async def test_a_reader_that_does_not_read_is_dropped_and_stops_nobody(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(road_end, "MAX_BUFFERED_BYTES", 100_000)
    caplog.set_level(logging.INFO)
    server = RoadServer(worker, PATIENT)
    road = Road(server, await server.start("127.0.0.1"))
    link = await road.link()
    stranger = await Stranger.connect(road)
    await stranger.greet(road.address.key)
    await stranger.message()
    for number in range(3000):  # what the kernel holds for the reader comes first
        stranger.write(encode(Ask(number, "describe")))
        if number % 100 == 0:
            assert len(await read(link, ask(2))) == 2
        if "does not read" in caplog.text:
            break
    assert "bytes wait and the other side does not read them" in caplog.text
    stranger.close()
    link.close()
    await server.close()


async def test_late_tokens_are_dropped(road: Road) -> None:
    link = await road.link()
    request = ask(200)
    whole = ids(await read(link, replace(request, id="whole")))
    stream = link.generate(request)
    await anext(stream)
    await stream.aclose()
    again = await read(link, request)
    assert ids(again) == whole
    assert link.num_late >= 0
    link.close()


@pytest.fixture
def leaver(random_llama: Path) -> Iterator[Worker]:
    """A worker of a test's own, because it does not come back."""
    worker = start_worker(random_llama, max_num_seqs=2, max_waiting=2)
    yield worker
    worker.stop()


async def test_a_leaving_worker_finishes_what_runs_and_takes_nothing_new(leaver: Worker) -> None:
    server = RoadServer(leaver, QUICK)
    link = await RoadLink.connect(await server.start(), "gateway-test", QUICK)
    running = asyncio.ensure_future(read(link, ask(100)))
    while not server.num_open():
        await asyncio.sleep(0.01)
    draining = asyncio.ensure_future(server.drain(20))
    assert "is leaving" in await link.leaving()
    with pytest.raises(EngineError, match="takes no new requests"):
        await read(link, ask())
    assert len(await running) == 100
    await draining
    await link.gone()


async def test_a_leaving_worker_hands_over_what_does_not_end_in_time(leaver: Worker) -> None:
    server = RoadServer(leaver, QUICK)
    link = await RoadLink.connect(await server.start(), "gateway-test", QUICK)
    running = [asyncio.ensure_future(read(link, ask(450))) for _ in range(4)]
    while server.num_open() < 4:
        await asyncio.sleep(0.01)
    await server.drain(0.1)
    for outputs in await asyncio.gather(*running):
        assert outputs[-1].finish_reason is FinishReason.MOVED
        assert outputs[-1].position == len(ids(outputs))
    assert server.num_open() == 0
    assert leaver.stats()["kv_pages_used"] == 0


async def test_a_token_out_of_place_ends_its_stream(road: Road) -> None:
    link = await road.link()
    stream = link.generate(ask(300))
    await anext(stream)
    (attempt,) = link._end._attempts.values()
    attempt.position += 1
    with pytest.raises(EngineError, match=r"sent token \d+ where \d+ was next"):
        async for _ in stream:
            pass
    await until_idle(link)
    link.close()


async def test_the_load_comes_with_steps_and_beats(road: Road) -> None:
    link, idle = await road.link(), await road.link()
    await read(link, ask(10))
    load, heard = link.load(), idle.load()
    assert load is not None and load.decode_tokens_s > 0
    await asyncio.sleep(0.2)
    heard = idle.load()
    assert heard is not None and heard.decode_tokens_s > 0
    link.close()
    idle.close()


async def test_every_gateway_hears_at_once_that_a_worker_is_held(road: Road) -> None:
    first, second = await road.link(), await road.link()
    for is_held in (True, False):
        await first.hold(is_held)
        async with asyncio.timeout(5):
            while (load := second.load()) is None or load.is_held != is_held:
                await asyncio.sleep(0.01)
    await first.hold(True)
    third = await road.link()
    async with asyncio.timeout(5):
        while (load := third.load()) is None:
            await asyncio.sleep(0.01)
    assert load.is_held, "its first word says so"
    await first.hold(False)
    for link in (first, second, third):
        link.close()
