"""Pools without a worker: what is remembered or settled of them, whose demand an answer is, and
that it is held for the pool that can give it while others are awake.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from polypath.deployments.autoscaling import scale as scaled
from polypath.deployments.autoscaling_pools import (
    Demand,
    PoolRules,
    PoolState,
    ScalingRules,
    Tokens,
)
from polypath.deployments.demands import MAX_SETS
from polypath.deployments.fleet import PoolSpec
from polypath.deployments.needs import Needs, parse_requirements
from polypath.deployments.pool_memory import PoolBook, PoolMemory
from polypath.deployments.router import Ask, RoutingRules
from polypath.deployments.served_worker import Worker
from polypath.deployments.waiting import Limits, Line
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import QueueFullError, RequestError
from polypath.tests.paced import PacedLink
from polypath.tests.virtual_time import run_virtually

SMALL = PoolMemory(name="small", max_model_len=64)
LARGE = PoolMemory(name="large", max_model_len=512, price=4.0)
HUGE = PoolMemory(name="huge", max_model_len=4096, price=9.0)


def needs(require: str = "", num_tokens: int = 1) -> Needs:
    return Needs(num_tokens=num_tokens, requirements=parse_requirements(require)[0])


def ask(num_tokens: int) -> Ask:
    return Ask(needs=needs(num_tokens=num_tokens), num_prompt=10, num_answer=20)


async def worker(pool: str, max_model_len: int, **options: object) -> Worker:
    link = PacedLink(f"of-{pool}", pool=pool, max_model_len=max_model_len, **options)  # type: ignore[arg-type]
    return Worker.of(link, await link.describe())


def fresh(*pools: PoolMemory) -> tuple[PoolMemory, ...]:
    return tuple(replace(pool) for pool in pools)


@pytest.mark.parametrize(
    ("require", "num_tokens", "lack"),
    [
        ("", 100, ""),
        ("", 101, "it holds 100 tokens of 101"),
        ("pool=p", 1, ""),
        ("pool!=p", 1, "pool is p"),
        ("label.zone=b", 1, ""),
        ("label.zone=c", 1, "label.zone is a"),
        ("label.spot=yes", 1, ""),
        ("device=cpu", 1, "device is cuda"),
        ("device=cuda,runner=graph,quantization=int8", 1, ""),
        ("worker=worker-1", 1, "a name of its own"),
        ("worker!=worker-1", 1, ""),
    ],
)
def test_a_pool_that_never_ran_lacks_only_what_its_configuration_settles(
    require: str, num_tokens: int, lack: str
) -> None:
    engine = EngineConfig(model="/m", max_model_len=100)
    selector = {"zone": "in(a,b)", "spot": "!yes"}
    memory = PoolMemory.of(
        PoolSpec(name="p", engine=engine, num_gpus=1, label_selector=selector), 8192
    )
    found = memory.why_not(needs(require, num_tokens))
    assert bool(found) == bool(lack) and lack in " ".join(found)


def test_an_engine_without_options_goes_as_far_as_the_model() -> None:
    memory = PoolMemory.of(PoolSpec(engine=EngineConfig(model="/m")), 8192)
    assert memory.context == 8192 and not memory.why_not(needs("device=cuda"))


def test_the_last_worker_speaks_for_its_pool() -> None:
    async def work() -> None:
        (memory,) = fresh(HUGE)
        last = await worker("huge", 200, plan={"device": "cpu"})
        PoolBook({}, [memory]).met(last)
        assert memory.context == 200
        assert memory.why_not(needs(num_tokens=201)) == ["it holds 200 tokens of 201"]
        assert memory.why_not(needs("device=cuda")) and not memory.why_not(needs("device=cpu"))
        assert not memory.why_not(needs("worker!=of-huge")), "the next one is called otherwise"
        assert memory.why_not(needs("worker=of-huge"))

    run_virtually(work())


@pytest.mark.parametrize(
    ("awake", "num_tokens", "pools"),
    [
        ((), 10, None),
        (("small",), 100, {"large", "huge"}),
        (("small", "huge"), 100, {"large", "huge"}),
        (("small", "large", "huge"), 100, {"large", "huge"}),
        (("small",), 1000, {"huge"}),
        (("small",), 10_000, None),
    ],
)
def test_an_answer_that_not_all_pools_can_give_belongs_to_those_that_can(
    awake: tuple[str, ...], num_tokens: int, pools: set[str] | None
) -> None:
    async def work() -> frozenset[str] | None:
        contexts = {each.name: each.max_model_len for each in (SMALL, LARGE, HUGE)}
        workers = {name: await worker(name, contexts[name]) for name in awake}
        return PoolBook(workers, fresh(HUGE, SMALL, LARGE)).able(needs(num_tokens=num_tokens))

    assert run_virtually(work()) == pools


@pytest.mark.parametrize(
    ("awake", "prefer", "spill", "num_tokens", "pools"),
    [
        ((), ("huge",), True, 10, None),
        ((), ("huge",), False, 10, {"huge"}),
        (("small",), ("huge", "small"), False, 10, {"small"}),  # as it is routed
        (("small",), ("small",), False, 100, {"large", "huge"}),
        (("small", "large"), ("huge",), False, 10, {"small", "large"}),
        ((), (), False, 10, None),
    ],
)
def test_without_spill_it_belongs_to_the_best_pool_alone(
    awake: tuple[str, ...],
    prefer: tuple[str, ...],
    spill: bool,
    num_tokens: int,
    pools: set[str] | None,
) -> None:
    async def work() -> frozenset[str] | None:
        contexts = {each.name: each.max_model_len for each in (SMALL, LARGE, HUGE)}
        workers = {name: await worker(name, contexts[name]) for name in awake}
        book = PoolBook(workers, fresh(HUGE, SMALL, LARGE))
        return book.able(needs(num_tokens=num_tokens), RoutingRules(prefer=prefer, spill=spill))

    assert run_virtually(work()) == pools


def test_clients_who_name_ever_other_sets_of_pools_make_no_endless_report() -> None:
    async def work() -> dict[frozenset[str] | None, Demand]:
        names = [f"p{number}" for number in range(10)]
        pools = [
            PoolMemory(name=name, max_model_len=64, possible={"pool": (name,)}) for name in names
        ]
        workers: dict[str, Worker] = {}
        line = Line(workers, Limits(stranded_s=60.0), PoolBook(workers, pools, prefer=["p3"]))
        held = [
            asyncio.create_task(
                line.place(
                    Ask(needs=needs(f"pool={a}|p3|{b}"), num_prompt=1, num_answer=1), arrived_s=0.0
                )
            )
            for a in names
            for b in names
        ]
        await asyncio.sleep(1)
        demands = line.demands(1.0)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return demands

    demands = run_virtually(work())
    assert len(demands) <= MAX_SETS + 1
    assert sum(each.num_unfinished for each in demands.values()) == 100
    assert demands[frozenset({"p3"})].num_unfinished > 1, "the rest is the first pool's"


async def _line(max_queued: int | None = None) -> tuple[Line, dict[str, Worker], PoolBook]:
    workers = {"s": await worker("small", 64, max_num_seqs=1, max_waiting=4)}
    book = PoolBook(workers, fresh(SMALL, LARGE))
    limits = Limits(stranded_s=60.0, max_queued=max_queued)
    return Line(workers, limits, book), workers, book


def test_an_answer_is_held_for_the_sleeping_pool_that_can_give_it() -> None:
    async def work() -> None:
        line, workers, book = await _line()
        held = asyncio.create_task(line.place(ask(100), arrived_s=0.0))
        await asyncio.sleep(30)
        assert not held.done()
        demands = line.demands(10.0)
        large = demands[frozenset({"large"})]
        assert large.num_unfinished == 1
        assert large.waiting == Tokens(prompt=10, new=20)
        assert None not in demands, "no other pool is asked to grow for it"
        workers["l"] = await worker("large", 512)
        book.met(workers["l"])
        line.changed()
        job = await held
        assert job.worker is workers["l"] and job.is_bound
        job.end()

    run_virtually(work())


def test_what_no_pool_can_ever_give_is_refused_at_once_with_what_each_lacks() -> None:
    async def work() -> None:
        line, workers, _ = await _line()
        with pytest.raises(RequestError, match="pool large, without a worker now: it holds 512"):
            await line.place(ask(1000), arrived_s=0.0)
        workers.clear()
        with pytest.raises(RequestError, match=r"pool small, without.*pool large, without"):
            await line.place(ask(1000), arrived_s=0.0)

    run_virtually(work())


def test_a_pool_believed_able_whose_worker_is_not_lets_the_answer_go() -> None:
    async def work() -> None:
        line, workers, book = await _line()
        held = asyncio.create_task(line.place(ask(500), arrived_s=0.0))
        await asyncio.sleep(1)
        workers["l"] = await worker("large", 400)  # less memory than was hoped for
        book.met(workers["l"])
        line.changed()
        with pytest.raises(RequestError, match="of-large: it holds 400 tokens of 500"):
            await held
        del workers["l"]
        with pytest.raises(RequestError, match="pool large, without a worker now"):
            await line.place(ask(500), arrived_s=2.0)

    run_virtually(work())


def test_held_answers_keep_neither_place_nor_turn_from_others() -> None:
    async def work() -> None:
        line, workers, _ = await _line(max_queued=2)
        held = [asyncio.create_task(line.place(ask(100), arrived_s=0.0)) for _ in range(70)]
        await asyncio.sleep(1)
        line.require_space(2)
        short = await line.place(ask(10), arrived_s=1.0)
        assert short.worker is workers["s"] and not short.is_bound
        line.asleep_queue = 60
        line.require_space(2, needs(num_tokens=10))
        with pytest.raises(QueueFullError, match="70 answers wait here, and the limit is 60"):
            line.require_space(1, needs(num_tokens=100))
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert len(line) == 0

    run_virtually(work())


def test_those_who_are_held_cost_nobody_time_until_a_worker_comes() -> None:
    """Each was judged anew whenever another one came: 500 that came at once took seconds."""

    async def work() -> None:
        line, workers, book = await _line(max_queued=2)
        line.asleep_queue, judged = 1000, 0
        real = Needs.why_not

        def why_not(asked: Needs, found: Worker) -> list[str]:
            nonlocal judged
            judged += 1
            return real(asked, found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Needs, "why_not", why_not)
            held = [asyncio.create_task(line.place(ask(100), arrived_s=0.0)) for _ in range(500)]
            await asyncio.sleep(1)
            assert len(line) == 500 and judged < 20 * 500
            at_rest = judged
            await asyncio.sleep(5)
            assert judged == at_rest, "nothing has changed"
        workers["l"] = await worker("large", 2048)
        book.met(workers["l"])
        line.changed()
        await asyncio.sleep(0.1)
        placed = [task for task in held if task.done()]
        assert placed and all(task.result().worker is workers["l"] for task in placed)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run_virtually(work())


def test_a_full_queue_of_the_awake_keeps_no_place_from_what_a_sleeping_pool_is_woken_for() -> None:
    async def work() -> None:
        line, _, _ = await _line(max_queued=2)
        short = [asyncio.create_task(line.place(ask(10), arrived_s=0.0)) for _ in range(4)]
        await asyncio.sleep(1)
        with pytest.raises(QueueFullError, match="2 answers wait here, and the limit is 2"):
            line.require_space(1, needs(num_tokens=10))
        line.require_space(1, needs(num_tokens=100))
        for task in short:
            task.cancel()
        await asyncio.gather(*short, return_exceptions=True)

    run_virtually(work())


POOL = PoolState(
    rules=PoolRules(min_workers=0, max_workers=3, price=1.0, cold_start_s=20.0),
    ready=0,
    target=0,
    prefill_tokens_s=1000.0,
    decode_tokens_s=100.0,
)
DEAR = replace(POOL, rules=replace(POOL.rules, price=50.0))


@pytest.mark.parametrize(
    ("bound", "workers"),
    [
        (Demand(), 0),
        (Demand(num_unfinished=1), 1),  # it runs
        (Demand(num_unfinished=1, waiting=Tokens(prompt=50, new=20)), 1),
        (Demand(num_unfinished=9, waiting=Tokens(new=4000)), 2),  # 40 s in 5 and 20
        (Demand(num_unfinished=9, arriving=Tokens(new=160)), 3),
        (Demand(num_unfinished=9, arriving=Tokens(new=16_000)), 3),
    ],
)
def test_a_pool_gets_workers_for_its_own_demand_beside_a_cheaper_one_that_is_awake(
    bound: Demand, workers: int
) -> None:
    pools = {"cheap": replace(POOL, ready=1, target=1), "dear": DEAR}
    own = {frozenset({"dear"}): bound}
    found = scaled(ScalingRules(), pools, Demand(num_unfinished=1), {}, 0.0, own)
    assert found.targets == {"cheap": 1, "dear": workers}


def test_it_keeps_them_while_its_own_answers_run_and_lets_them_go_after_the_delay() -> None:
    rules = ScalingRules(scale_down_delay_s=60.0)
    pools = {"cheap": POOL, "dear": replace(DEAR, ready=1, target=1)}
    memory: dict[str, list[tuple[float, int]]] = {}
    targets = []
    for now_s, unfinished in [(0, 1), (500, 1), (501, 0), (561, 0)]:
        own = {frozenset({"dear"}): Demand(num_unfinished=unfinished)}
        found = scaled(rules, pools, Demand(), memory, float(now_s), own)
        memory = found.memory
        targets.append(found.targets["dear"])
    assert targets == [1, 1, 1, 0]
