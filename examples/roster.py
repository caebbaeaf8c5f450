"""Who is here, what they do, and what may wake them. Start a space first: `tidings up --open --detach`."""

import asyncio

import tidings


async def main() -> None:
    async with (
        tidings.connect(name="ada", channels=["lounge"]) as ada,
        tidings.connect(name="bob", channels=["lounge"]) as bob,
    ):
        seen: asyncio.Queue[tidings.AgentEntry] = asyncio.Queue()
        ada.on("presence", seen.put_nowait)
        bob.transport.presence.set_attention("focus")
        await bob.announce("working", "reading the diff")
        while (agent := await asyncio.wait_for(seen.get(), 10)).activity != "reading the diff":
            pass
        print(f"{agent.name} is {agent.status}: {agent.activity} ({agent.attention})")
        await ada.send("lounge", "small talk")
        await ada.send("lounge", "a question for you", mentions=["bob"])
        for _ in range(2):  # attention decides what wakes, never what arrives
            message = await bob.next_message(timeout=10)
            print(f"{message.text}: {'wakes' if message.wakes else 'does not wake'} bob")
            await message.ack()


asyncio.run(main())
