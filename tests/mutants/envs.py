"""Mutants of verlite.envs: observations, tool calls and tool failures that go wrong."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import calls, constant, does_nothing, result, returns

SEARCH = "verlite.envs.search:"
CALCULATOR = "verlite.envs.calculator:"
CHAT = "verlite.envs.chat:"
STEP = "verlite.envs.step:"
FACTORY = "verlite.envs.factory:"
RETRIEVER = "verlite.envs.retriever:"
CONTRACT = "verlite.contracts.envs:"
PROMISES = "tests/contracts/test_envs.py"
CLIENT = "tests/envs/test_retriever.py"


def _unlimited_observation(original, *args, **kwargs):
    encode = original(*args, **kwargs)
    return lambda step, context, limit: encode(step, context, 10**9)


def _one_token_more(original, *args, **kwargs):
    encode = original(*args, **kwargs)
    return lambda step, context, limit: encode(step, context, limit + 1)


def _always_valid(original, self, text, last):
    async def step():
        answer = await original(self, text, last)
        return dataclasses.replace(answer, valid=True)

    return step()


def _one_cache_entry(original, self, query):
    async def search():
        return await original(self, "capital of France")

    return search()


def _evaluated(original, expression):
    return eval(expression)


def _ignores_kwargs(original, spec):
    return original(dataclasses.replace(spec, kwargs={}))


MUTANTS = [
    Mutant(
        "malformed turns count as valid",
        SEARCH + "SearchEnv.step",
        calls(_always_valid),
        ("tests/envs/test_search.py",),
    ),
    Mutant(
        "an expression is run as Python",
        CALCULATOR + "calculate",
        calls(_evaluated),
        ("tests/envs/test_calculator.py",),
    ),
    Mutant(
        "results of any size are accepted",
        CALCULATOR + "_MAX_RESULT",
        constant(float("inf")),
        ("tests/envs/test_calculator.py",),
    ),
    Mutant(
        "a truncated observation is one token too long",
        STEP + "encode_text",
        calls(_one_token_more),
        ("tests/rollout/test_trajectory.py",),
    ),
    Mutant(
        "chat observations are never truncated",
        CHAT + "encode_chat",
        calls(_unlimited_observation),
        ("tests/envs/test_chat.py",),
    ),
    Mutant(
        "env.kwargs do not reach the environment",
        FACTORY + "build_env_factory",
        calls(_ignores_kwargs),
        ("tests/envs/test_factory.py",),
    ),
    Mutant(
        "all queries share one cache entry",
        RETRIEVER + "RetrieverClient.search",
        calls(_one_cache_entry),
        (CLIENT,),
    ),
    Mutant(
        "a passage goes to another query",
        RETRIEVER + "_passages",
        result(lambda lists: list(reversed(lists))),
        (CLIENT,),
    ),
    Mutant(
        "the contract plays every sample only once",
        CONTRACT + "_check_repeats",
        does_nothing,
        (PROMISES,),
    ),
    Mutant(
        "the contract accepts a step that makes all samples wait",
        CONTRACT + "_Heart.longest_pause",
        returns(0.0),
        (PROMISES,),
    ),
]
