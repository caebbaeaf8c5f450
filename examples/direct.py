"""One agent writes to another and learns that it was read. Start a space first: `tidings up --open --detach`."""

import asyncio

import tidings


async def main() -> None:
    async with tidings.connect(name="ada") as ada, tidings.connect(name="bob") as bob:
        receipt = await ada.dm("bob", "can you look at this?")  # sealed: only the two of them can read it
        message = await bob.next_message(timeout=10)
        print(f"{message.sender.name} to bob: {message.text}")
        await message.ack()  # settled: it does not come again
        told = await ada.receipt(receipt, "read", timeout=10)
        print(f"ada's message is {told.stage}")


asyncio.run(main())
