"""Who takes too much of the broker, decided without one."""

from tidings.supervisor.watcher import (
    BURST,
    HOUR_LEAST,
    MOST_CONNECTIONS,
    MOST_RETURNS,
    MOST_SUBSCRIPTIONS,
    AgentBounds,
)

MB = 1_000_000


def bounds(rate: int | None = 8 * MB, budget: int = 512 * MB) -> AgentBounds:
    return AgentBounds(budget, rate)


def test_an_agent_has_so_many_connections_and_those_beyond_are_one_too_many() -> None:
    watched = bounds()
    assert [watched.connected("ada", n, 0.0)[0] for n in range(MOST_CONNECTIONS + 2)] == [False] * 32 + [True] * 2
    watched.disconnected(0, 0, 0.0)
    watched.disconnected(40, 0, 0.0)
    watched.disconnected(33, 0, 0.0)
    watched.disconnected(32, 0, 0.0)
    assert watched.connected("ada", 50, 0.0) == (False, None)
    assert watched.connected("bob", 51, 0.0) == (False, None)
    watched.compare({51})
    watched.compare({51})
    assert [watched.connected("ada", n, 0.0)[0] for n in range(60, 60 + MOST_CONNECTIONS)] == [False] * 32


def test_whoever_comes_back_too_often_while_it_has_all_it_may_have_breaks_the_bound() -> None:
    slow, quick = bounds(), bounds()
    for n in range(MOST_CONNECTIONS):
        slow.connected("ada", n, 0.0)
        quick.connected("ada", n, 0.0)
    for n in range(MOST_RETURNS * 3):
        assert slow.connected("ada", 1000 + n, n * 0.06)[1] is None
        slow.disconnected(1000 + n, 0, n * 0.06)
    found = [quick.connected("ada", 1000 + n, n * 0.001)[1] for n in range(MOST_RETURNS + 1)]
    assert [breach is None for breach in found] == [True] * MOST_RETURNS + [False]
    assert found[-1] is not None
    assert "beyond the 32" in found[-1].why


def test_a_burst_is_fine_and_a_stream_above_the_rate_is_not_over_however_many_connections() -> None:
    watched = bounds()
    for n in range(4):
        watched.connected("ada", n, 0.0)
    assert watched.sent(0, BURST, 0.0) is None
    assert watched.sent(0, BURST + 8 * MB, 1.0) is None
    assert watched.sent(1, 1 * MB, 1.0) is not None


def test_what_a_short_connection_sent_counts() -> None:
    watched = bounds()
    found = []
    for n in range(40):
        watched.connected("ada", n, 0.0)
        found.append(watched.disconnected(n, 1 * MB, 0.0))
    assert [breach for breach in found if breach] != []


def test_what_was_sent_before_anybody_watched_counts_against_nobody() -> None:
    watched = bounds()
    watched.connected("ada", 1, 0.0, sent=100 * BURST)
    assert watched.sent(1, 100 * BURST, 0.0) is None
    assert watched.sent(1, 100 * BURST + 1 * MB, 0.0) is None
    assert watched.sent(1, 101 * BURST + 1, 0.0) is not None


def test_a_connection_that_is_learned_again_keeps_what_was_counted_of_it() -> None:
    watched = bounds()
    watched.connected("ada", 1, 0.0)
    watched.sent(1, 8 * MB, 0.0)
    watched.connected("ada", 1, 0.0, sent=4 * MB)
    assert watched.sent(1, BURST, 0.0) is None
    watched.connected("ada", 1, 0.0, sent=10 * BURST)
    assert watched.sent(1, BURST + 1, 0.0) is not None


def test_an_hour_of_less_than_the_rate_costs_the_posting_and_not_the_credential() -> None:
    watched = bounds()
    watched.connected("ada", 1, 0.0)
    sent, found = 0, []
    for second in range(60):
        sent += 2 * MB
        found += [watched.sent(1, sent, float(second))]
    breaches = [breach for breach in found if breach]
    assert [(breach.agent, breach.void) for breach in breaches] == [("ada", False)]
    assert "in an hour" in breaches[0].why
    assert sent > HOUR_LEAST


def test_a_quota_that_was_raised_raises_what_may_be_sent_in_an_hour() -> None:
    watched = bounds(rate=40 * MB)
    watched.connected("ada", 1, 0.0)
    assert watched.sent(1, 0, 0.0) is None
    found = [watched.sent(1, 20 * MB * second, float(second)) for second in range(1, 20)]
    assert next(filter(None, found)).void is False
    assert found.index(next(filter(None, found))) == 5 * HOUR_LEAST // (20 * MB)
    assert bounds(rate=1 * MB).most_an_hour(1 * MB) == HOUR_LEAST


def test_a_connection_is_forgotten_when_two_lists_in_a_row_do_not_have_it() -> None:
    watched = bounds()
    for n in (1, 2):
        watched.connected("ada", n, 0.0)
    for present in ({2}, {1}, {2}):
        watched.compare(present)
        assert watched.connections_of("ada") == {1, 2}
    watched.compare({2})
    assert watched.connections_of("ada") == {2}
    assert watched.agent_of(1) is None


def test_without_a_quota_bytes_are_not_counted() -> None:
    watched = bounds(rate=None)
    watched.connected("ada", 1, 0.0)
    assert watched.sent(1, 10**12, 0.1) is None


def test_subscriptions_are_counted_over_all_connections_of_an_agent() -> None:
    watched = bounds()
    for n in range(6):
        watched.connected("ada" if n < 5 else "bob", n, 0.0)
    assert watched.subscribed([(n, 800) for n in range(6)]) == []
    over = watched.subscribed([(n, 801) for n in range(6)])
    assert [breach.agent for breach in over] == ["ada"]
    assert f"{MOST_SUBSCRIPTIONS:,}" in over[0].why
