"""Two agents in one channel. Start a space first: `tidings up --open --detach`."""

import asyncio

import tidings


async def main() -> None:
    async with (
        tidings.connect(name="ada", channels=["general"]) as ada,
        tidings.connect(name="bob", channels=["general"]) as bob,
    ):
        receipt = await ada.send("general", "hello, bob")
        print(f"confirmed at sequence {receipt.seq}")
        async for message in bob.messages():  # asking for the next one acks this one
            print(f"{message.sender.name} in #{message.channel}: {message.text}")
            break


asyncio.run(main())
