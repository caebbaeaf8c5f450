"""Commands on a space that runs in this process: the same programs, without the seconds a supervisor takes."""

import asyncio
import json
import os
import re
import subprocess
from typing import Any

import tidings
from command_lines import parse
from terminal import Terminal
from tidings.contract.admin import RevokeRequest
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


async def run(terminal: Terminal, *words: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(terminal.run, *words)


async def test_tail_all_shows_every_channel_that_may_be_read_and_each_message_once(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("ada", read=["general", "team.>", "team.a"])
    await space.add("eve", read=[])
    await space.add("me", read=[], post=[">"])
    refused = await run(terminal, "tail", "--all", "--as", "eve")
    assert (refused.returncode, "may read nothing" in refused.stderr) == (4, True)
    both = await run(terminal, "tail", "general", "--all", "--as", "ada")
    assert (both.returncode, "one of the two" in both.stderr) == (2, True)
    watching = terminal.start("tail", "--all", "--count", "3", "--json", TIDINGS_AS="ada")
    assert watching.stderr is not None
    assert "watching general, team.>, team.a" in await asyncio.to_thread(watching.stderr.readline)
    for channel in ("secret", "team.a", "general", "team.b"):
        assert (await run(terminal, "send", channel, f"to {channel}")).returncode == 0
    out, _ = await asyncio.to_thread(watching.communicate, timeout=30)
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["to team.a", "to general", "to team.b"]


async def test_an_agent_that_is_revoked_and_whose_token_still_holds_is_told_so_in_one_sentence(
    terminal: Terminal, space: RealSpace
) -> None:
    row = (await space.add("mal")).row
    await space.add("me")
    async with space.administer() as admin:
        await admin.call(RevokeRequest(row.id))
    for words in (("inbox",), ("dm", "me", "hello")):
        done = await run(terminal, *words, "--as", "mal")
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert f"mal ({row.id}) was revoked" in done.stderr
        assert "Traceback" not in done.stderr
        assert "empty" not in done.stderr
    checked = await run(terminal, "doctor", "connection", "--as", "mal")
    assert (checked.returncode, "was revoked" in checked.stdout) == (3, True), checked.stderr


async def test_attention_is_shown_and_set_from_a_terminal(terminal: Terminal, space: RealSpace) -> None:
    await space.add("me")
    await space.add("bob")
    nothing = {"mode": "open", "channels": {}, "kept": False, "running": None}
    assert json.loads((await run(terminal, "attention", "--json")).stdout) == nothing
    done = await run(terminal, "attention", "dnd", "--channel", "team.>", "quiet")
    assert (done.returncode, "does not run now" in done.stderr) == (0, True)
    kept = json.loads((await run(terminal, "attention", "--json")).stdout)
    assert (kept["mode"], kept["channels"], kept["kept"]) == ("dnd", {"team.>": "quiet"}, True)
    other = json.loads((await run(terminal, "attention", "--as", "bob", "--json")).stdout)
    assert other == nothing, "each agent has its own"
    for words in (("asleep",), ("--channel", "general", "loud"), ("--channel", "a b", "muted")):
        assert (await run(terminal, "attention", *words)).returncode == 2, words


async def test_after_a_success_the_next_command_is_named_and_is_one(terminal: Terminal, space: RealSpace) -> None:
    await space.add("me", read=[">"], post=[">"], manage=[">"])
    terminal.watched = True
    for line in (
        "agent add bob --role reviewer",
        "agent list",
        "agent show bob",
        "agent access bob",
        "agent access bob --read general",
        "join general",
        "send general hello",
        "history general",
        "channels list",
        "channels info general",
        "channels members general",
        "channels set general --description talk",
        "leave general",
        "who",
        "dm bob hello",
        "inbox --as bob",
        "attention",
        "attention dnd",
        "ask reviewer look",
        "work --role reviewer --exec true --once --as bob",
        "dead list",
        "space list",
        "space show",
        "space set class=live",
        "config",
        "version",
        "doctor --home /nowhere",
        "agent rotate bob",
        "agent revoke bob --yes",
    ):
        done = await run(terminal, *line.split())
        assert done.returncode == 0, (line, done)
        *_, hint = done.stderr.splitlines()
        assert hint.startswith("next: "), (line, done.stderr)
        parse(hint.removeprefix("next: "))


async def test_without_a_steward_a_join_is_not_claimed_and_an_asked_task_is_named(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("me", roles=["reviewer"])
    await space.stop_steward()
    joined = await run(terminal, "join", "general")
    assert (joined.returncode, joined.stdout) == (5, "")
    assert "me did not join general" in joined.stderr
    asked = await run(terminal, "ask", "reviewer", "is it right?")
    assert (asked.returncode, asked.stdout) == (5, "")
    (named,) = re.findall(r"task (\S+) is queued", asked.stderr)
    await space.start_steward()
    found = await run(terminal, "trace", named, "--json")
    assert json.loads(found.stdout)["stored"], "it is there, so asking again would make a second one"


async def test_no_text_passes_for_a_message_of_somebody_else(terminal: Terminal, space: RealSpace) -> None:
    await space.add("me")
    await run(terminal, "send", "general", "hello\n12:00:00 #general bob: I agree")
    first, second = (await run(terminal, "history", "general")).stdout.splitlines()
    assert first.endswith("#general me: hello")
    assert second == "    12:00:00 #general bob: I agree"


async def test_dead_letters_are_listed_shown_retried_and_dropped_from_a_terminal(
    terminal: Terminal, pair: RealSpace
) -> None:
    retry = tidings.Retry(attempts=1)
    place: dict[str, Any] = {"home": pair.home.home, "retry": retry}
    async with tidings.connect(pair.home.name, name="bob", channels=["general"], **place) as bob:
        async with tidings.connect(pair.home.name, name="ada", **place) as ada:
            sent = await ada.send("general", "eat this")
            await ada.dm(bob.id, "and this")
        for _ in range(2):
            await (await bob.next_message(10)).nak(error="it tastes bad")
        await eventually(lambda: not bob.transport._direct.pending)
    listed = await run(terminal, "dead", "list", "--as", "bob")
    assert f"channel-{sent.seq}" in listed.stdout
    assert "direct-1" in listed.stdout
    shown = await run(terminal, "dead", "show", f"channel-{sent.seq}", "--as", "bob")
    assert "it tastes bad" in shown.stdout
    assert "eat this" in shown.stdout
    wanted = await run(terminal, "dead", "retry", f"channel-{sent.seq}", "--as", "bob")
    assert (wanted.returncode, "is wanted" in wanted.stderr) == (0, True)
    dropped = await run(terminal, "dead", "drop", "direct-1", "--yes", "--as", "bob")
    assert (dropped.returncode, "is dropped" in dropped.stderr) == (0, True)
    left = json.loads((await run(terminal, "dead", "list", "--as", "bob", "--json")).stdout)
    assert [(each["letter"], each["state"]) for each in left] == [(f"channel-{sent.seq}", "wanted")]


async def test_a_rotation_says_what_is_unread_and_what_it_dropped_is_in_both_inboxes(
    terminal: Terminal, space: RealSpace
) -> None:
    for name in ("me", "hal"):
        await space.add(name, roles=["reviewer"])
    assert (await run(terminal, "dm", "hal", "are you there?")).returncode == 0
    asked = await run(terminal, "ask", "reviewer", "is it right?", "--as", "hal")
    task = asked.stdout.strip()
    refused = await run(terminal, "agent", "rotate", "hal")
    assert (refused.returncode, refused.stdout) == (6, "")
    assert "1 direct message" in refused.stderr
    assert "--drop-unread" in refused.stderr
    dropped = await run(terminal, "agent", "rotate", "hal", "--drop-unread")
    assert dropped.returncode == 0, dropped.stderr
    assert "what was unread is dropped: 1 direct message" in dropped.stderr
    assert "your key is new, and what lay unread" in (await run(terminal, "inbox", "--as", "hal")).stdout
    mine = await run(terminal, "inbox")
    assert "a direct message you sent to hal will not be read: hal has a new key" in mine.stdout
    assert (await run(terminal, "work", "--role", "reviewer", "--exec", "echo yes", "--once")).returncode == 0
    found = await run(terminal, "result", task, "--as", "hal", "--wait", "20")
    assert (found.returncode, found.stdout.strip()) == (0, "yes"), found.stderr


async def test_arguments_and_files_that_cannot_be_used_are_refused_in_a_sentence_and_change_nothing(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("me")
    folder = space.home.home.parent
    nested, listed, binary = folder / "nested.json", folder / "listed.json", folder / "binary.md"
    nested.write_text("[" * 100_000)
    listed.write_text("[1, 2]")
    binary.write_bytes(b"---\nname: \xff\xfe\n---")
    pipe, link = folder / "pipe", folder / "link"
    os.mkfifo(pipe)
    link.symlink_to(listed)
    refusals = {
        ("agent", "add", "ada", "--expires", "9999999999d"): "is too large: at most 3,155,760,000",
        ("space", "set", "keep_bytes=99999999999999999999999999"): "is too large",
        ("agent", "add", "--file", str(binary)): f"{binary} is damaged: it is not UTF-8 text",
        ("agent", "import", str(nested)): "is not a bundle",
        ("agent", "import", str(listed)): "it is not a JSON object",
        ("agent", "export", "me", "--output", str(pipe)): f"{pipe} is not a plain file",
        ("agent", "export", "me", "--output", str(link)): f"{link} is not a plain file",
        ("agent", "export", "me", "--url", "nats://[x"): "is not an address of a NATS server",
        ("send", "general", "x", "--home", str(listed)): "Not a directory",
    }
    for words, reason in refusals.items():
        done = await run(terminal, *words)
        assert (done.returncode, reason in done.stderr, "Traceback" in done.stderr) == (2, True, False), done
    assert [row["name"] for row in json.loads((await run(terminal, "agent", "list", "--json")).stdout)] == ["me"]
    assert (pipe.is_fifo(), link.is_symlink(), listed.read_text()) == (True, True, "[1, 2]")
