"""The answers in the golden vectors have the fields that a real steward gives, with values of the same kinds."""

import base64
import json
from typing import Any

import schema
from tidings.client.publishing import MSG_ID
from tidings.wire import signing
from tidings.wire.message import Message, Sender, compose, new_id
from tidings_testing.real_space import AgentClient, RealSpace

EXCHANGES: dict[str, dict[str, Any]] = {
    each["why"]: each for each in json.loads((schema.FOLDER / "vectors.json").read_text())["exchanges"]
}


def shape(value: Any) -> Any:
    """What fields there are and of which kind; of a list, its first."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


async def send(agent: AgentClient, subject: str, kind: str, destination: str, message: Message) -> None:
    headers = {"Td-Sig": signing.sign(agent.key, agent.space_id, kind, destination, message.raw), MSG_ID: message.id}
    reply = await agent.connection.request(subject, message.raw, headers=headers, timeout=5)
    assert "seq" in json.loads(reply.data)


async def test_a_real_steward_answers_with_the_fields_that_the_vectors_have(space: RealSpace) -> None:
    await space.add("ada", read=["general"], post=["general"])
    await space.add("bob", read=["general"], post=["general"], roles=["reviewer"])
    seen: set[str] = set()
    async with space.agent("ada") as ada, space.agent("bob") as bob:

        async def ask(why: str, agent: AgentClient, **values: Any) -> dict[str, Any]:
            """The request of the vector, with values of this space in it."""
            vector = EXCHANGES[why]
            seen.add(why)
            _, _, _, service, _ = vector["subject"].split(".")
            body = vector["request"] | {"op": new_id()} | values
            reply = await agent.connection.request(
                space.subjects.control(service, agent.id), json.dumps(body).encode(), timeout=30
            )
            answer: dict[str, Any] = json.loads(reply.data)
            expected, found = shape(vector["answer"]), shape(answer)
            for each in (expected, found):  # how far durable delivery is depends on whether there is one
                each.pop("backstop", None)
            assert found == expected, why
            return answer

        joined = await ask("a join", ada)
        said = compose(Sender(ada.id, "ada"), text="hello")
        await send(ada, space.subjects.chat(ada.id, "general"), "chat", "general", said)
        page = await ask("a page of history", ada)
        await ask("a record that is the asker's", ada, seq=page["records"][0]["seq"])
        await ask("a record that is not", ada, seq=joined["seq"])
        await ask("a leave", ada, joined=joined["seq"])
        await ask("a join of what it may not read", ada)
        await ask("a verb that nobody knows", ada)
        await ask("an argument that nobody knows", ada)
        await ask("to receive", ada)
        await ask("a beat", ada)
        await ask("no task", bob)
        await send(ada, space.subjects.task("reviewer", ada.id), "task", "reviewer", said)
        task = await ask("a task", bob)
        done = compose(Sender(bob.id, "bob"), text="fine", reply_to=said.id)
        signature = signing.sign(bob.key, bob.space_id, "result", f"{ada.id}.{said.id}", done.raw)
        result = base64.b64encode(done.raw).decode()
        await ask("a result", bob, seq=task["task"]["seq"], result=result, sig=signature)
        await ask("what became of a task", ada, id=said.id)
    assert seen == set(EXCHANGES)
