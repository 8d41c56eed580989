"""The record of a session equals that of a naive reference, which compares whole lists."""

import copy
import random

import pytest

from verlite.gateway.conversation import Match, Root, Session, State

TEXTS = ("a", "b")
"""So few messages that equal conversations happen all the time."""


class Naive:
    """Answered requests as (messages with the answer, tokens with the answer), compared in full."""

    def __init__(self):
        self.answered = []

    def match(self, request, column):
        """Return the numbers of the longest beginnings in a column, and their length."""
        begins = [
            (len(entry[column]), number)
            for number, entry in self.answered
            if 0 < len(entry[column]) <= len(request)
            and request[: len(entry[column])] == entry[column]
        ]
        longest = max((length for length, _ in begins), default=0)
        return [number for length, number in begins if length == longest], longest


def play(seed, steps=60):
    """Play a random session on both. Yields (session, tokens, masks) of each node."""
    rng = random.Random(seed)
    session, naive = Session(), Naive()
    tokens, masks, running = {}, {}, []
    fresh = iter(range(10**6))
    for _ in range(steps):
        move = rng.random()
        if running and move < 0.45:
            node, messages = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.25:
                session.abort(node)
                continue
            sampled = [next(fresh) for _ in range(rng.randrange(4))]
            answer = [*messages, rng.choice(TEXTS)]
            log_probs = [-token / 7 for token in sampled]
            session.answer(node, sampled, log_probs, [(3, len(sampled))], "stop", answer)
            tokens[node.number] = tokens[node.number] + sampled
            masks[node.number] = masks[node.number] + [1] * len(sampled)
            naive.answered.append((node.number, (answer, tokens[node.number])))
            continue
        earlier = [list(entry[0]) for _, entry in naive.answered if rng.random() < 0.5]
        begun = rng.choice(earlier) if earlier and move < 0.9 else []
        messages = [*begun, *rng.choices(TEXTS, k=rng.randrange(1, 3))]
        match = session.match(messages)
        rewritten = match.parent is not None and rng.random() < 0.1
        candidates, known = naive.match(messages, 0)
        only = len(candidates) == 1
        parent = match.parent.number if match.parent else None
        assert (parent, match.known, match.candidates) == (
            candidates[0] if only else None,
            known,
            len(candidates),
        )
        given = [next(fresh) for _ in range(rng.randrange(1, 4))]
        node = session.begin(match, given, rewritten)
        continues = only and not rewritten
        before = candidates[0] if continues else None
        tokens[node.number] = (tokens[before] if continues else []) + given
        masks[node.number] = (masks[before] if continues else []) + [0] * len(given)
        running.append((node, messages))
        yield session, tokens, masks


@pytest.mark.parametrize("seed", range(60))
def test_a_session_equals_the_naive_reference(seed):
    last = {}
    for session, tokens, masks in play(seed):
        for node in session.nodes:
            mask = [m for n in node.path for m in [0] * len(n.given) + [1] * len(n.sampled)]
            assert (node.context, mask) == (tokens[node.number], masks[node.number])
        for number, context in last.items():  # nothing that was answered ever changes
            assert session.nodes[number].context == context
        answered = [node for node in session.nodes if node.state is State.ANSWERED]
        last = {node.number: node.context for node in answered}
        for node in answered:
            assert node.log_probs == [-token / 7 for token in node.sampled]
        # A leaf is not the beginning of any other answered context.
        contexts = {node.number: tokens[node.number] for node in answered}
        leaves = [
            number
            for number, ids in contexts.items()
            if not any(session.nodes[n].parent is session.nodes[number] for n in contexts)
        ]
        assert [leaf.number for leaf in session.leaves()] == leaves
        ledger = session.ledger()
        assert ledger["requests"] == ledger["running"] + ledger["answered"] + ledger["aborted"]
        assert ledger["branches"] == len(leaves)
        branches = session.branches()
        ends = [(path[0].number, path[-1].number) for path, _ in branches]
        assert ends == sorted(ends) and sorted(leaf for _, leaf in ends) == leaves
        new = [node.number for path, known in branches for node in path[known:]]
        assert sorted(new) == sorted(contexts), "each answered request is new in one branch"
        known = [path[n - 1].number if n else None for path, n in branches]
        repeated = sum(len(tokens[number]) for number in known if number is not None)
        every = sum(len(tokens[number]) for number in leaves)
        assert (ledger["tokens"], ledger["repeated_tokens"]) == (every, repeated)
        for path, count in branches:  # what a branch repeats is the beginning of an earlier one
            shared = [node.number for node in path[:count]]
            assert all(n in new[: new.index(path[-1].number)] for n in shared)
        distinct = {token for number in leaves for token in tokens[number]}
        assert every - repeated == len(distinct), "tokens of play are all different"


@pytest.mark.parametrize("seed", range(20))
def test_a_request_given_as_tokens_continues_the_longest_context_that_begins_it(seed):
    rng = random.Random(seed)
    session, naive = Session(), Naive()
    session.begin(session.match_tokens([7]), [7])  # runs, so nothing continues it
    for _ in range(40):
        earlier = rng.choice(naive.answered)[1][0] if naive.answered and rng.random() < 0.9 else []
        ids = [*earlier, *rng.choices((7, 8), k=rng.randrange(1, 3))]
        match = session.match_tokens(ids)
        candidates, known = naive.match(ids, 0)
        assert (match.known, match.candidates) == (known, len(candidates))
        assert (match.parent.number if match.parent else None) == (
            candidates[0] if len(candidates) == 1 else None
        )
        node = session.begin(match, ids[match.known :] if match.parent else ids)
        sampled = rng.choices((7, 8), k=rng.randrange(1, 3))
        session.answer(node, sampled, [0.0] * len(sampled), [(1, len(sampled))], "stop", ())
        assert node.context == ids + sampled
        naive.answered.append((node.number, (node.context, None)))


def answered(session, messages, answer="x", given=(1,), sampled=(2,)):
    node = session.begin(session.match(messages), given)
    session.answer(
        node, sampled, [0.0] * len(sampled), [(1, len(sampled))], "stop", [*messages, answer]
    )
    return node


def test_identical_answers_to_identical_requests_are_quarantined():
    session = Session()
    answered(session, ["u"])
    answered(session, ["u"])
    assert session.match(["u", "x", "t"]) == Match(None, 2, 2)
    node = session.begin(session.match(["u", "x", "t"]), [1, 2, 3])
    assert (node.root, node.context) == (Root.AMBIGUOUS, [1, 2, 3])
    assert session.ledger()["ambiguous_roots"] == 1


def test_siblings_with_different_answers_are_told_apart():
    session = Session()
    first, second = answered(session, ["u"], "x"), answered(session, ["u"], "y", sampled=(9,))
    assert session.match(["u", "y", "t"]).parent is second
    assert session.match(["u", "x", "t"]).parent is first
    assert session.ledger()["branches"] == 2


def test_an_aborted_request_is_continued_by_nothing_and_does_not_make_its_retry_ambiguous():
    session = Session()
    session.abort(session.begin(session.match(["u"]), [1]))
    retry = answered(session, ["u"], given=[1])
    assert session.match(["u", "x", "t"]).parent is retry
    ledger = session.ledger()
    assert (ledger["aborted"], ledger["branches"], ledger["repeated_tokens"]) == (1, 1, 0)


def test_a_running_request_is_no_parent_yet():
    session = Session()
    session.begin(session.match(["u"]), [1])
    assert session.match(["u", "x", "t"]) == Match(None, 0, 0)


def test_a_repeated_request_is_a_sibling_and_continues_nothing():
    session = Session()
    first = answered(session, ["u"])
    second = answered(session, ["u", "x", "t"], given=[3])
    assert (second.parent, second.root) == (first, None)
    repeated = session.begin(session.match(["u", "x", "t"]), [3])
    assert repeated.parent is first


def test_the_reasons_of_branches_are_counted():
    session = Session()
    answered(session, ["u"])
    answered(session, ["other"])
    session.begin(session.match(["u", "x", "t"]), [5], rewritten=True)
    ledger = session.ledger()
    assert [ledger[f"{root}_roots"] for root in (Root.NEW, Root.REWRITTEN, Root.AMBIGUOUS)] == [
        1,
        1,
        0,
    ]


def test_a_request_ends_once():
    session = Session()
    node = answered(session, ["u"])
    before = copy.deepcopy(node)
    with pytest.raises(ValueError, match="request 0 is answered, so it cannot be aborted"):
        session.abort(node)
    with pytest.raises(ValueError, match="cannot be answered"):
        session.answer(node, [], [], [], "stop", ["u", "y"])
    assert node == before


def test_an_answer_with_lists_of_different_lengths_is_refused():
    session = Session()
    node = session.begin(session.match(["u"]), [1])
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs"):
        session.answer(node, [1, 2], [0.0], [(1, 2)], "stop", ["u", "x"])
    node = session.begin(session.match(["u"]), [1])
    with pytest.raises(ValueError, match="2 tokens, 2 log-probs"):
        session.answer(node, [1, 2], [0.0, 0.0], [(1, 1)], "stop", ["u", "x"])


@pytest.mark.parametrize("pair", [(["ab"], ["a", "b"]), (["a", "b"], ["b", "a"])])
def test_messages_are_not_confused_with_their_concatenation_or_order(pair):
    session = Session()
    answered(session, pair[0])
    assert session.match([*pair[1], "x", "t"]).candidates == 0
