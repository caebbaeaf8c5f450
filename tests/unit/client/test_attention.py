"""What wakes an agent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.client.intake import level_of, wakes
from tidings.wire.message import Priority
from tidings.wire.roster import Attention, Level, Mode

MODES: tuple[Mode, ...] = ("open", "dnd", "focus")
LEVELS: tuple[Level, ...] = ("normal", "quiet", "muted")
PRIORITIES: tuple[Priority, ...] = ("now", "next", "low")
attentions = st.builds(
    Attention,
    mode=st.sampled_from(MODES),
    channels=st.dictionaries(st.sampled_from(["general", "team.a", "team.*", "team.>", ">"]), st.sampled_from(LEVELS)),
)
channels = st.sampled_from(["general", "team.a", "team.b.c"])


@pytest.mark.parametrize(
    ("mode", "level", "plain", "now", "mention"),
    [
        ("open", "normal", True, True, True),
        ("open", "quiet", False, True, True),
        ("open", "muted", False, False, False),
        ("dnd", "normal", False, True, True),
        ("dnd", "quiet", False, True, True),
        ("dnd", "muted", False, False, False),
        ("focus", "normal", False, False, True),
        ("focus", "quiet", False, False, True),
        ("focus", "muted", False, False, False),
    ],
)
def test_on_a_channel_mode_and_level_decide(mode: Mode, level: Level, plain: bool, now: bool, mention: bool) -> None:
    attention = Attention(mode, {"general": level})
    assert wakes(attention, "channel", "general", "next", False) is plain
    assert wakes(attention, "channel", "general", "now", False) is now
    assert wakes(attention, "channel", "general", "next", True) is mention


@given(attentions, st.sampled_from(["channel", "direct", "task"]), channels, st.booleans())
def test_low_never_wakes(attention: Attention, kind: str, channel: str, mention: bool) -> None:
    assert not wakes(attention, kind, channel, "low", mention)


@given(attentions, st.sampled_from(["direct", "task"]), st.sampled_from(["now", "next"]))
def test_what_is_addressed_to_this_agent_alone_wakes_in_every_mode(
    attention: Attention, kind: str, priority: Priority
) -> None:
    assert wakes(attention, kind, None, priority, False)


@given(attentions, channels, st.sampled_from(PRIORITIES))
def test_a_mention_never_wakes_less_than_no_mention(attention: Attention, channel: str, priority: Priority) -> None:
    assert wakes(attention, "channel", channel, priority, True) >= wakes(attention, "channel", channel, priority, False)


@given(attentions, channels, st.booleans())
def test_urgency_never_wakes_less(attention: Attention, channel: str, mention: bool) -> None:
    low, following, now = (
        wakes(attention, "channel", channel, priority, mention) for priority in ("low", "next", "now")
    )
    assert low <= following <= now


@given(attentions, channels, st.sampled_from(PRIORITIES), st.booleans())
def test_a_stricter_mode_never_wakes_more(
    attention: Attention, channel: str, priority: Priority, mention: bool
) -> None:
    woken = [wakes(Attention(mode, attention.channels), "channel", channel, priority, mention) for mode in MODES]
    assert woken == sorted(woken, reverse=True)


def test_the_most_specific_pattern_speaks_and_the_quieter_one_between_equals() -> None:
    attention = Attention("open", {">": "muted", "team.>": "quiet", "team.*": "normal", "team.a": "muted"})
    assert level_of(attention, "team.a") == "muted"
    assert level_of(attention, "team.b") == "normal"
    assert level_of(attention, "team.b.c") == "quiet"
    assert level_of(attention, "general") == "muted"
    assert level_of(Attention("open", {"*.b": "quiet", "a.*": "muted"}), "a.b") == "muted"
