"""For the tests of tasks: a space with somebody who asks and two who review, and the steps they share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tidings
from tidings.client.tasks import Job
from tidings.contract.tasks import ClaimRequest
from tidings.model.task_rules import TaskBook
from tidings.nats.jetstream import JetStream
from tidings.steward.service import Steward
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.message import Sender
from tidings_testing.real_space import DEFAULT_BUDGET, TEST_INTERVALS, AgentClient, RealSpace, real_space

PACE = replace(TEST_INTERVALS, task_silence=1.5, task_ack_wait=1.0, task_backoff=0.05, task_keep=0.0)


@asynccontextmanager
async def reviewers(home: Path, budget: int = DEFAULT_BUDGET) -> AsyncIterator[RealSpace]:
    """A space with ada, who asks, and bob and cat, who review; holds are short."""
    async with real_space(home, intervals=PACE, budget=budget) as running:
        await running.add("ada")
        await running.add("bob", roles=["reviewer"])
        await running.add("cat", roles=["reviewer"])
        yield running


def connect(space: RealSpace, name: str) -> tidings.DirectAgent:
    return tidings.connect(space.home.name, name=name, home=space.home.home)


def steward_of(space: RealSpace) -> Steward:
    assert isinstance(space.steward, Steward)
    return space.steward


def book_of(space: RealSpace) -> TaskBook:
    return steward_of(space).tasks.holds.book


async def one(endpoint: tidings.DirectAgent, role: str = "reviewer") -> Job:
    """Claim one job, outside a loop."""
    return await asyncio.wait_for(anext(aiter(_kept(endpoint, role))), 15)


_LOOPS: list[AsyncIterator[Job]] = []


def _kept(endpoint: tidings.DirectAgent, role: str) -> AsyncIterator[Job]:
    loop = endpoint.work(role)
    _LOOPS.append(loop)  # a loop that is forgotten gives its job back
    return loop


def signed_result(worker: AgentClient, asker: str, task_id: str, text: str = "yes") -> dict[str, Any]:
    payload = wire.compose(Sender(worker.id, worker.name), text=text, reply_to=task_id).raw
    sig = signing.sign(worker.key, worker.space_id, "result", f"{asker}.{task_id}", payload)
    return {"result": payload, "sig": sig}


async def claimed(worker: AgentClient, wait: float = 2.0) -> int:
    """Claims a task of the role `reviewer` and returns its sequence."""
    task = (await worker.control.call(ClaimRequest("reviewer", wait))).task
    assert task is not None
    return task.seq


async def results_in(js: JetStream) -> list[int]:
    head = (await js.info("AUD_main"))["state"]["last_seq"]
    return [r.seq async for page in js.read("AUD_main", "td.main.aud.result.*", 1, head) for r in page]
