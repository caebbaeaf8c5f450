"""A task for whoever holds a role. Start a space first: `tidings up --open --detach`.

Roles are granted, also in an open space: `tidings agent add carol --role reviewer`.
"""

import asyncio

import tidings


async def review(carol: tidings.DirectAgent) -> None:
    async for job in carol.work("reviewer"):  # one at a time; while it is held, nobody else gets it
        print(f"carol reviews for {job.asker.name}: {job.text}")
        await job.done("looks good")  # or job.fail("cannot build", retry=True)


async def main() -> None:
    async with tidings.connect(name="ada") as ada, tidings.connect(name="carol") as carol:
        working = asyncio.create_task(review(carol))
        ticket = await ada.ask("reviewer", "please review the change", deadline=600)
        result = await ticket.result(timeout=20)
        print(f"{result.worker_name}: {result.text} ({result.state})")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


asyncio.run(main())
