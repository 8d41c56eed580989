"""The record of a session: which tokens a program gave to the model, and which the model sampled.

A node is one request: the tokens given after its parent, then the tokens sampled. Nodes are only
added, and their tokens never change. A context is the path from a root to a node. A branch is the
path to a leaf. A program that talks to the model turn by turn makes one branch; retries, sub-agents
and a compacted history make several.

The next request of a conversation is found by its messages, or by its tokens if it is given as
tokens. It continues the answered node whose messages and answer are its longest beginning, or all
of it, and only the rest is encoded. What the model sampled is never encoded again. A request begins
a branch of its own, with all its tokens given, if

- no answered node begins it (`Root.NEW`): a sub-agent, a compacted or edited history;
- the chat template would write earlier messages in another way (`Root.REWRITTEN`);
- several answered nodes begin it (`Root.AMBIGUOUS`): two calls with the same messages got the same
  answer. The next request does not say which one it continues, so it is counted and not guessed.

Two requests with the same beginning are siblings, also while both run. Requests may run in
parallel; a node can be continued once it is answered. An aborted request, whose client is gone or
whose engine failed, keeps no answer: nothing continues it, and nothing of it is trained.

Like the control this does no IO.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Spans = list[tuple[int, int]]
"""(weight version, number of tokens that it sampled) of consecutive tokens, oldest first."""


class State(StrEnum):
    """Where a request is. Each is in exactly one state."""

    RUNNING = "running"
    ANSWERED = "answered"
    ABORTED = "aborted"


class Root(StrEnum):
    """Why a request has no parent."""

    FIRST = "first"
    """It is the first request of the session."""
    NEW = "new"
    REWRITTEN = "rewritten"
    AMBIGUOUS = "ambiguous"


@dataclass
class Node:
    """A request and its answer."""

    number: int
    """Its place in the order of arrival, from 0."""
    parent: "Node | None"
    given: list[int]
    """Tokens that follow the parent's, before the answer. Of a root the whole prompt."""
    root: Root | None = None
    """None: it has a parent."""
    state: State = State.RUNNING
    sampled: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of each sampled token, under the distribution that it was drawn from."""
    versions: Spans = field(default_factory=list)
    """Weights that sampled the tokens."""
    finish_reason: str = ""
    """ "stop" or "length", once answered."""

    @property
    def path(self) -> "list[Node]":
        """The nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def prompt(self) -> list[int]:
        """The tokens that the answer is sampled after, from the root on."""
        return [*(self.parent.context if self.parent else ()), *self.given]

    @property
    def context(self) -> list[int]:
        """All tokens from the root to the end of the answer."""
        return [token for node in self.path for token in (*node.given, *node.sampled)]


@dataclass(frozen=True)
class Match:
    """What a request continues.

    parent: the answered node; None: none, or several.
    known: how many of the request's messages, or tokens, are the parent's and its answer.
    candidates: how many answered nodes begin the request so far.
    """

    parent: Node | None
    known: int
    candidates: int


class Session:
    """The requests of one program.

    Attributes:
        nodes: all of them, in the order of arrival.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._answered: dict[bytes, list[Node]] = {}

    def match(self, messages: Sequence[str], named: int | None = None) -> Match:
        """Find what a request continues. Changes nothing.

        Args:
            messages: each message of the request as text that is equal for equal messages. What
                else the prompt depends on, such as tools, comes first.
            named: number of the node that the request says it continues, where several begin it.
        """
        digests = _digests(messages)
        for known in range(len(messages), 0, -1):
            found = self._answered.get(digests[known - 1], [])
            if found:
                found = [node for node in found if node.number == named] or found
                parent = found[0] if len(found) == 1 else None
                return Match(parent, known, len(found))
        return Match(None, 0, 0)

    def match_tokens(self, ids: Sequence[int]) -> Match:
        """Find what a request continues that is given as tokens: the answered nodes whose context
        is its longest beginning. Changes nothing."""
        ends: dict[int, int] = {}  # length of each context that begins it
        for node in self.nodes:
            begin = ends.get(node.parent.number) if node.parent else 0
            if begin is not None and node.state is State.ANSWERED:
                tokens = [*node.given, *node.sampled]
                if list(ids[begin : begin + len(tokens)]) == tokens:
                    ends[node.number] = begin + len(tokens)
        known = max(ends.values(), default=0)
        found = [self.nodes[number] for number, end in ends.items() if end == known]
        return Match(found[0] if len(found) == 1 else None, known, len(found))

    def begin(self, match: Match, given: Sequence[int], rewritten: bool = False) -> Node:
        """Add a running request.

        Args:
            match: of its messages.
            given: the tokens after the parent's; without a parent, all.
            rewritten: the parent's tokens are not used, because the template would write them in
                another way.
        """
        parent = None if rewritten else match.parent
        root = None
        if parent is None:
            root = Root.NEW if self.nodes else Root.FIRST
            if match.candidates:
                root = Root.REWRITTEN if match.candidates == 1 else Root.AMBIGUOUS
        node = Node(len(self.nodes), parent, list(given), root)
        self.nodes.append(node)
        return node

    def answer(
        self,
        node: Node,
        sampled: Sequence[int],
        log_probs: Sequence[float],
        versions: Spans,
        finish_reason: str,
        messages: Sequence[str],
    ) -> None:
        """A running request is answered.

        messages: those of its request and the answer, as the program will send them next time. ():
        the request was given as tokens.

        Raises ValueError if it does not run, or if the lists do not describe the same tokens.
        """
        if not len(sampled) == len(log_probs) == sum(count for _, count in versions):
            raise ValueError(
                f"an answer has {len(sampled)} tokens, {len(log_probs)} log-probs and the weight "
                f"versions {versions}"
            )
        self._end(node, State.ANSWERED)
        node.sampled, node.log_probs = list(sampled), list(log_probs)
        node.versions, node.finish_reason = list(versions), finish_reason
        if messages:
            self._answered.setdefault(_digests(messages)[-1], []).append(node)

    def abort(self, node: Node) -> None:
        """A running request gets no answer. Raises ValueError if it does not run."""
        self._end(node, State.ABORTED)

    def _end(self, node: Node, state: State) -> None:
        if node.state is not State.RUNNING:
            raise ValueError(f"request {node.number} is {node.state}, so it cannot be {state}")
        node.state = state

    def leaves(self) -> list[Node]:
        """Return the answered nodes that no answered node continues, in the order of arrival."""
        answered = [node for node in self.nodes if node.state is State.ANSWERED]
        inner = {node.parent.number for node in answered if node.parent is not None}
        return [node for node in answered if node.number not in inner]

    def branches(self) -> list[tuple[list[Node], int]]:
        """Return the path of each branch, and how many of its first nodes earlier branches have.

        They are in the order of their roots, then of their leaves. Each answered node is new in
        exactly one of them.
        """
        seen: set[int] = set()
        found = []
        for path in sorted((leaf.path for leaf in self.leaves()), key=lambda path: path[0].number):
            found.append((path, sum(node.number in seen for node in path)))
            seen |= {node.number for node in path}
        return found

    def credits(self, rule: str) -> dict[int, float]:
        """Return the factor of the sample's advantage on the tokens of each answered node, by its
        number.

        rule: "graph": 1. "branch": branches weigh the same, whatever their length, and the factors
            of all tokens have the mean 1. A number: to the power of how many answers follow.
        """
        answered = [node.number for node in self.nodes if node.state is State.ANSWERED]
        if rule == "graph":
            return dict.fromkeys(answered, 1.0)
        if rule != "branch":
            return {node: float(rule) ** after for after, node in enumerate(reversed(answered))}
        new = [path[known:] for path, known in self.branches()]
        tokens = [sum(len(node.sampled) for node in nodes) for nodes in new]
        mean = sum(tokens) / max(1, sum(map(bool, tokens)))
        return {
            node.number: mean / max(1, count)
            for nodes, count in zip(new, tokens, strict=True)
            for node in nodes
        }

    def ledger(self) -> dict[str, int]:
        """Return what became of the requests, and the tokens of all branches: those that several
        share count in each of them, and are repeated in all but one."""
        states = Counter(node.state for node in self.nodes)
        roots = Counter(node.root for node in self.nodes)
        branches = self.branches()
        return {
            "requests": len(self.nodes),
            **{str(state): states[state] for state in State},
            "branches": len(branches),
            **{f"{root}_roots": roots[root] for root in Root if root is not Root.FIRST},
            "tokens": sum(len(path[-1].context) for path, _ in branches),
            "repeated_tokens": sum(len(path[n - 1].context) for path, n in branches if n),
        }


def _digests(messages: Sequence[str]) -> list[bytes]:
    """Return a digest of the first message, of the first two, and so on."""
    digest, found = b"", []
    for message in messages:
        digest = hashlib.sha256(digest + hashlib.sha256(message.encode()).digest()).digest()
        found.append(digest)
    return found
