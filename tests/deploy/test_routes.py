"""Where requests go: sessions stay, prompts follow their prefix, others go to the least loaded."""

from itertools import chain

from bough.deploy import routes
from bough.deploy.routes import CHUNK, Hint, Routes

IDLE = {"a": 0, "b": 0, "c": 0}


def prompt(*chunks: int) -> list[int]:
    """Return a prompt whose chunks differ where the numbers do."""
    return list(chain.from_iterable([number] * CHUNK for number in chunks))


def hint(*chunks: int, session: str = "") -> Hint:
    return Hint.of(session, prompt(*chunks))


def test_without_knowledge_all_replicas_are_equal():
    assert Routes(1, 2).ranked(hint(1, 2), IDLE) == ["a", "b", "c"]


def test_idle_replicas_take_turns():
    routing, went = Routes(1, 2), []
    for number in range(6):
        went.append(routing.ranked(hint(number, session=f"new {number}"), IDLE)[0])
        routing.record(hint(number, session=f"new {number}"), went[-1])
    assert went == ["a", "b", "c"] * 2


def test_a_session_stays_while_its_replica_takes_requests():
    routing = Routes(1, 2)
    routing.record(hint(session="mine"), "b")
    assert routing.ranked(hint(session="mine"), {"a": 1, "b": 2, "c": 0}) == ["b", "c", "a"]
    assert routing.ranked(hint(session="mine"), {"a": 0, "b": 3, "c": 0}) == ["a", "c"]
    assert routing.ranked(hint(session="other"), IDLE) == ["a", "c", "b"]
    # Serve took the next rank: the session moves.
    routing.record(hint(session="mine"), "c")
    assert routing.ranked(hint(session="mine"), IDLE)[0] == "c"


def test_a_session_whose_replica_ended_goes_anywhere():
    routing = Routes(1, 2)
    routing.record(hint(session="mine"), "b")
    assert routing.ranked(hint(session="mine"), {"a": 0, "c": 0}) == ["a", "c"]


def test_a_prompt_goes_where_its_longest_prefix_is():
    routing = Routes(1, 2)
    routing.record(hint(1, 2), "a")
    routing.record(hint(1, 2, 3), "b")
    routing.record(hint(4), "c")
    assert routing.ranked(hint(1, 2, 3, 5), IDLE) == ["b", "a", "c"]
    assert routing.ranked(hint(1, 2, 6), IDLE) == ["a", "b", "c"]
    assert routing.ranked(hint(4, 4), IDLE)[0] == "c"
    # The same chunk after another beginning is another prefix.
    assert routing.ranked(hint(7, 2), {"a": 1, "b": 1, "c": 0}) == ["c", "a", "b"]


def test_the_last_tokens_are_no_part_of_a_prefix():
    routing = Routes(1, 2)
    routing.record(Hint.of("", [*prompt(1), 5]), "b")
    assert routing.ranked(Hint.of("", [*prompt(1), 6, 7]), IDLE)[0] == "b"
    assert Hint.of("", [1] * (CHUNK - 1)).prefixes == ()


def test_a_prefix_is_no_reason_to_wait_while_another_replica_has_a_slot():
    routing = Routes(2, 2)
    routing.record(hint(1), "a")
    assert routing.ranked(hint(1), {"a": 1, "b": 0}) == ["a", "b"]
    assert routing.ranked(hint(1), {"a": 2, "b": 1}) == ["b", "a"]
    assert routing.ranked(hint(1), {"a": 3, "b": 2}) == ["a", "b"]


def test_full_replicas_take_no_request():
    routing = Routes(1, 2)
    routing.record(hint(1), "a")
    assert routing.ranked(hint(1), {"a": 3, "b": 3}) == []
    assert routing.ranked(hint(1), {"a": 3, "b": 2}) == ["b"]


def test_replicas_that_ended_are_forgotten():
    routing = Routes(1, 2)
    routing.record(hint(1, session="mine"), "a")
    routing.keep(["b"])
    assert routing.ranked(hint(1, session="mine"), {"a": 1, "b": 0}) == ["b", "a"]


def test_the_least_recently_used_are_forgotten(monkeypatch):
    monkeypatch.setattr(routes, "MOST_CHUNKS", 3)
    monkeypatch.setattr(routes, "MOST_SESSIONS", 2)
    routing = Routes(2, 2)
    for number, name in enumerate("abc"):
        routing.record(hint(0, number, session=name), name)
    # Chunk 0 of all prompts is kept, the second one of the oldest is not.
    assert routing.ranked(hint(0, 0), {"a": 1, "b": 0, "c": 0})[0] == "b"
    assert routing.ranked(hint(0, 2), IDLE)[0] == "c"
    assert routing.ranked(hint(session="a"), {"a": 1, "b": 0})[0] == "b"
    assert routing.ranked(hint(session="c"), {"a": 0, "c": 1})[0] == "c"
