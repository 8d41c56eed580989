"""Mutants of verlite.gateway: conversations that are merged, encoded again, or trained wrongly."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import calls, returns

RECORD = "verlite.gateway.conversation:"
GATEWAY = "verlite.gateway.server:"
AGENTS = "verlite.gateway.agents:"
CHAT = "verlite.envs.chat:"
GRAPH = ("tests/gateway/test_conversation.py",)
SERVER = ("tests/gateway/test_gateway.py",)
SUITE = ("tests/contracts/test_gateway.py",)
DIALECTS = ("tests/gateway/test_dialects.py",)
SAME = "tests/trainer/test_preflight.py::test_check_and_command_say_the_same"
PROGRAMS = ("tests/gateway/test_agents.py::test_a_program_that_fails_is_an_unscored_sample",)


def _first_candidate(original, self, messages, named=None):
    found = original(self, messages, named)
    if found.candidates < 2:
        return found
    answered = [node for node in self.nodes if node.state == "answered"]
    return dataclasses.replace(found, parent=answered[0], candidates=1)


def _aborted_as_answered(original, self, node):
    self.answer(node, [], [], [], "stop", ())


def _rendered_again(original, self, asked, match):
    given, rewritten = original(self, asked, match)
    if match.parent is None or rewritten:
        return given, rewritten
    return self._engine.tokenizer.encode("again"), rewritten


def _lost_results(original, message, where, names):
    return [one for one in original(message, where, names) if one["role"] != "tool"]


def _same_seed(original, sampling, turn):
    return sampling


def _failed_is_zero(original, session, prompt_ids):
    trajectory = original(session, prompt_ids)
    trajectory.fail = lambda error: None
    return trajectory


MUTANTS = [
    Mutant(
        "identical siblings are merged", RECORD + "Session.match", calls(_first_candidate), GRAPH
    ),
    Mutant(
        "an aborted request counts as answered",
        RECORD + "Session.abort",
        calls(_aborted_as_answered),
        GRAPH,
    ),
    Mutant(
        "what branches share is trained in each of them",
        RECORD + "Session.branches",
        calls(lambda original, self: [(path, 0) for path, _ in original(self)]),
        (*GRAPH, "tests/gateway/test_agents.py::test_branches_of_a_graph_worked_out_by_hand"),
    ),
    Mutant(
        "special tokens of messages are special", CHAT + "Chat.has_special", returns(False), SERVER
    ),
    Mutant(
        "new messages are encoded without the template",
        GATEWAY + "Gateway._encode_chat",
        calls(_rendered_again),
        SERVER,
    ),
    Mutant(
        "tool results in Anthropic's messages are lost",
        "verlite.gateway.anthropic:_message",
        calls(_lost_results),
        DIALECTS,
    ),
    Mutant(
        "the conformance suite accepts prompts that were rendered again",
        "verlite.contracts.gateway:exact",
        returns(None),
        SUITE,
    ),
    Mutant(
        "all requests of a session have one seed", GATEWAY + "with_seed", calls(_same_seed), SERVER
    ),
    Mutant(
        "a program that fails is a sample without error",
        AGENTS + "as_trajectory",
        calls(_failed_is_zero),
        PROGRAMS,
    ),
    Mutant(
        "verlite check does not try agent.preload",
        "verlite.gateway.forks:check",
        returns("fine"),
        (f"{SAME}[rl-imports of agents]",),
    ),
]
