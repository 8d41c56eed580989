"""A conformance suite for gateways: servers of chat models that are to return the exact tokens of
conversations. It needs an address and nothing else, so it tests anyone's.

A server keeps exactness if the prompt of each request begins with the tokens that the model saw and
wrote before, for every answer that the request continues. Text that is rendered or encoded again
may have other tokens, so training would see another context than the model did. A request that
continues no answer, such as one with an edited history, must not begin with another's tokens.

Servers are asked with `return_token_ids`, as vLLM and OpenEnv's capture do, and must answer with
`prompt_token_ids` and `token_ids`. Answers are random, so a rule may not be seen at work. Then it
is reported as such, and not as kept.
"""

import math
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

MAX_TOKENS = 16
"""Of an answer."""
TRIES = 12
"""Answers that are asked for to see one that ends within a character."""
TIMEOUT_S = 120.0
"""Of an answer."""
TRICKY = "e\u0301 👩‍👩‍👧 שלום \u200b\ufeff ﷽ \\u0000 <|im_end|></s>"
"""A message with combined and joined characters, and what looks like special tokens."""

Json = dict[str, Any]


class Broken(Exception):
    """A rule is not kept."""


class Unseen(Exception):
    """A rule was not seen at work."""


@dataclass(frozen=True)
class Turn:
    """An answer. said: it as messages of the next request. earlier: texts of the answers in its
    prompt."""

    prompt: list[int]
    sampled: list[int]
    log_probs: list[float] | None
    text: str
    said: list[Json]
    earlier: tuple[str, ...] = ()

    @property
    def context(self) -> list[int]:
        return self.prompt + self.sampled


@dataclass(frozen=True)
class Dialect:
    """A kind of request.

    body: of a request with these messages.
    read: an answer: its log-probs, text and messages. Tokens are read where `places` says.
    tool: a call of the assistant that was never made, and its result.
    """

    path: str
    body: Callable[[list[Json]], Json]
    read: Callable[[Json], tuple[list[float] | None, str, list[Json]]]
    tool: Callable[[str], list[Json]]


@dataclass(frozen=True)
class Row:
    """A sequence that is trained: token ids, 1 on trained tokens and else 0, log-probs of those."""

    ids: list[int]
    mask: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Finding:
    """What became of a rule in a dialect. state: kept, broken or unseen. detail: why."""

    dialect: str
    rule: str
    state: str
    detail: str


def _chat_body(messages: list[Json]) -> Json:
    return {"messages": messages, "max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": 0}


def _read_chat(answer: Json) -> tuple[list[float], str, list[Json]]:
    (choice,) = answer["choices"]
    log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    message = {name: value for name, value in choice["message"].items() if value}
    return log_probs, message.setdefault("content", ""), [message]


def _chat_tool(text: str) -> list[Json]:
    function = {"name": "look", "arguments": '{"at": 1}'}
    call = {"id": "call_made", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [said, {"role": "tool", "tool_call_id": "call_made", "content": text}]


def _messages_body(messages: list[Json]) -> Json:
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    body = {"messages": others, "max_tokens": MAX_TOKENS}
    return body | ({"system": system[0]} if system else {})


def _read_messages(answer: Json) -> tuple[None, str, list[Json]]:
    blocks = answer["content"]
    text = "".join(block.get("text", "") for block in blocks)
    return None, text, [{"role": "assistant", "content": blocks}]


def _messages_tool(text: str) -> list[Json]:
    use = {"type": "tool_use", "id": "call_made", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "call_made", "content": text}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def _responses_body(messages: list[Json]) -> Json:
    return {"input": messages, "max_output_tokens": MAX_TOKENS, "store": False}


def _read_responses(answer: Json) -> tuple[None, str, list[Json]]:
    items = answer["output"]
    parts = [part for item in items for part in item.get("content") or []]
    return None, "".join(part.get("text", "") for part in parts), items


def _responses_tool(text: str) -> list[Json]:
    call = {"type": "function_call", "call_id": "call_made", "name": "look"}
    result = {"type": "function_call_output", "call_id": "call_made", "output": text}
    return [call | {"arguments": '{"at": 1}'}, result]


DIALECTS = {
    "chat completions": Dialect("chat/completions", _chat_body, _read_chat, _chat_tool),
    "messages": Dialect("messages", _messages_body, _read_messages, _messages_tool),
    "responses": Dialect("responses", _responses_body, _read_responses, _responses_tool),
}


@dataclass
class Talk:
    """Requests in one dialect. turns: all answers."""

    http: httpx.Client
    url: str
    model: str
    dialect: Dialect
    turns: list[Turn] = field(default_factory=list)

    def opening(self, text: str) -> Json:
        """Return a first message that no other conversation has: equal ones might get answers with
        equal texts, which no server can tell apart."""
        return user(f"{text} ({secrets.token_hex(4)})")

    def body(self, messages: list[Json], **more: Any) -> Json:
        own = {"model": self.model, "temperature": 1.0, "return_token_ids": True}
        return own | self.dialect.body(messages) | more

    def post(self, path: str, body: Json, **options: Any) -> Json:
        """Return an answer. Raises Broken: it is an error."""
        response = self.http.post(f"{self.url}/{path}", json=body, **options)
        if response.status_code != 200:
            raise Broken(f"status {response.status_code}: {response.text[:200]}")
        found: Json = response.json()
        return found

    def ask(self, messages: list[Json], **more: Any) -> Turn:
        answer = self.post(self.dialect.path, self.body(messages, **more))
        holder = (answer.get("choices") or [answer])[0]
        prompt = answer.get("prompt_token_ids") or holder.get("prompt_token_ids")
        sampled = holder.get("token_ids")
        if not prompt or sampled is None:
            raise Broken("the answer has no token ids (return_token_ids)")
        earlier = (t.text for t in list(self.turns) if t.context == prompt[: len(t.context)])
        turn = Turn(prompt, sampled, *self.dialect.read(answer), tuple(earlier))
        self.turns.append(turn)
        return turn


def exact(before: Turn, after: Turn) -> None:
    """Raise Broken if a prompt does not begin with an answer that it continues, and its prompt."""
    context = before.context
    known = after.prompt[: len(context)]
    if known == context:
        if len(after.prompt) == len(context):
            raise Broken("the new message is not in the prompt")
        return
    if any("</think>" in text or text[:1] == "\n" for text in (before.text, *before.earlier)):
        raise Unseen("the chat template may write earlier thoughts, or newlines, in another way")
    pairs = zip(context, known, strict=False)
    at = next((i for i, (old, new) in enumerate(pairs) if old != new), len(known))
    raise Broken(
        f"the next prompt differs from token {at} of {len(context)} on, of which the model wrote "
        f"those from {len(before.prompt)} on: they were {context[at : at + 6]} and are "
        f"{known[at : at + 6]}"
    )


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def _system(text: str) -> Json:
    return {"role": "system", "content": text}


# Rules: each returns what was seen


def _tokens(talk: Talk) -> str:
    return _log_probs(talk.ask([talk.opening("Say something.")]))


def _log_probs(turn: Turn) -> str:
    values = turn.log_probs
    if values is None:
        return "ids; no log-probs in this dialect"
    if len(values) != len(turn.sampled) or not all(-9999 < v <= 0 for v in values):
        raise Broken(f"{len(turn.sampled)} tokens have the log-probs {values}")
    return "ids and log-probs"


def _turns(talk: Talk) -> str:
    history, before = [_system("Be brief."), talk.opening("Tell me a story.")], None
    for number in range(4):
        turn = talk.ask(history)
        if before:
            exact(before, turn)
        history, before = [*history, *turn.said, user(f"Go on, {number}.")], turn
    return "4 turns"


def _tools(talk: Talk) -> str:
    """Results of calls, after an answer, must be in the prompt, each with its own text."""
    history = [talk.opening("What is there?")]
    first = talk.ask(history)
    history += [*first.said, user("Look again.")]
    prompts = [talk.ask([*history, *talk.dialect.tool(f"result {i}")]).prompt for i in range(2)]
    if prompts[0] == prompts[1]:
        raise Broken("two prompts with different results of a tool are equal: results are lost")
    own = [*history[:-1], *talk.dialect.tool("it was 7")[1:]]
    try:  # a result straight after an answer: servers may refuse it
        turns = [talk.ask(own), talk.ask([*history[:-1], *talk.dialect.tool("it was 8")[1:]])]
    except Broken:
        return "after a made-up call"
    if turns[0].prompt == turns[1].prompt:
        raise Broken("two prompts with different results of a tool are equal: results are lost")
    for turn in turns:
        exact(first, turn)
    exact(turns[0], talk.ask([*own, *turns[0].said, user("Sure?")]))
    return "after an answer, and after a made-up call"


def _sub_agents(talk: Talk) -> str:
    main = [talk.opening("Plan a trip.")]
    sub = [_system("You are a helper."), talk.opening("Find a hotel.")]
    first = talk.ask(main)
    second = talk.ask(sub)
    if second.prompt[: len(first.context)] == first.context:
        raise Broken("the prompt of a sub-agent begins with the conversation that started it")
    exact(first, talk.ask([*main, *first.said, user("It found: H.")]))
    exact(second, talk.ask([*sub, *second.said, user("A cheaper one.")]))
    return "one beside its parent"


def _compaction(talk: Talk) -> str:
    begin = talk.opening("One.")
    history = [begin, *talk.ask([begin]).said, user("Two.")]
    long = talk.ask(history)
    short = [talk.opening("Summary: one, two."), *long.said, user("Three.")]
    turn = talk.ask(short)
    if turn.prompt[: len(long.context)] == long.context:
        raise Broken("a compacted history still has the tokens that it left out")
    exact(turn, talk.ask([*short, *turn.said, user("Four.")]))
    exact(long, talk.ask([*history, *long.said, user("Three.")]))
    return "and the whole history goes on, too"


def _retries(talk: Talk) -> str:
    history = [talk.opening("Pick a word.")]
    turns = [talk.ask(history) for _ in range(3)]
    if any(turn.prompt != turns[0].prompt for turn in turns):
        raise Broken("equal requests have different prompts")
    for turn in turns:
        _siblings(talk, history, turns, turn)
    history = [talk.opening("Pick a letter.")]  # short answers have equal texts more often
    turns = [talk.ask(history, **{_limit(talk.dialect): 1}) for _ in range(3)]
    for turn in turns:
        _siblings(talk, history, turns, turn)
    return "3 answers to one request, twice, each continued"


def _siblings(talk: Talk, history: list[Json], turns: list[Turn], turn: Turn) -> None:
    """Continue one of several answers to the same request. Raises Broken."""
    new = [*history, *turn.said, user("Why?")]
    same = [other.sampled for other in turns if other.text == turn.text]
    after = talk.ask(new)
    if len(same) == 1:
        exact(turn, after)
    elif any(sampled != turn.sampled for sampled in same):
        # The request does not say which answer it continues. Only a prompt that was rendered is no
        # guess: it ends as that of the same messages after another first one.
        fresh = talk.ask([_system("Another beginning."), *new]).prompt
        tail = len(after.prompt) - len(turn.prompt)
        if after.prompt[-tail:] != fresh[-tail:]:
            raise Broken("two answers have the same text, and one of them was taken as meant")


def _parallel(talk: Talk) -> str:
    history = [talk.opening("Name a color.")]
    with ThreadPoolExecutor(4) as pool:
        turns = list(pool.map(talk.ask, [history] * 4))
        list(pool.map(lambda turn: _siblings(talk, history, turns, turn), turns))
    return "4 conversations with one beginning at once"


def _broken_streams(talk: Talk) -> str:
    history = [talk.opening("Make up a long story.")]
    body = talk.body(history, stream=True)
    for limit in (httpx.Timeout(TIMEOUT_S), httpx.Timeout(TIMEOUT_S, read=0.05)):
        with (
            suppress(httpx.TimeoutException),
            talk.http.stream(
                "POST", f"{talk.url}/{talk.dialect.path}", json=body, timeout=limit
            ) as response,
        ):
            next(response.iter_bytes(), b"")  # the rest is never read
    turn = talk.ask(history)
    exact(turn, talk.ask([*history, *turn.said, user("And on.")]))
    return "one cut after its first bytes, one left before them"


def _thoughts(talk: Talk) -> str:
    """Templates such as Qwen3's leave out thoughts of earlier turns once the user speaks again. A
    prompt either goes on after all that the model saw, or is the one that the template writes."""
    begin, words = talk.opening("What is there?"), {"role": "assistant", "content": "I see."}

    def history(thought: str) -> list[Json]:
        content: Any = f"<think>\n{thought}\n</think>\n\nI look."
        said, *result = talk.dialect.tool("it was 7")
        if talk.dialect.path == "responses":
            return [begin, {"role": "assistant", "content": content}, said, *result]
        if isinstance(said["content"], list):
            content = [{"type": "text", "text": content}, *said["content"]]
        return [begin, said | {"content": content}, *result]

    one, other = history("it is red"), history("it is blue")
    turn = talk.ask(one)
    if turn.prompt == talk.ask(other).prompt:
        raise Unseen("the chat template never writes thoughts")
    later = [talk.ask([*own, words, user("And now?")]).prompt for own in (one, other)]
    if later[0] != later[1]:
        raise Unseen("the chat template keeps thoughts")
    exact(turn, talk.ask([*one, *turn.said, *talk.dialect.tool("it was 8")]))  # nobody spoke
    tail = [*turn.said, user("And now?")]
    after, fresh = talk.ask([*one, *tail]), talk.ask([*other, *tail])
    if after.prompt[: len(turn.context)] == turn.context:
        return "kept in the prompt, as the model saw them"
    if after.prompt != fresh.prompt:
        raise Broken("a prompt whose template left out thoughts is not what the template writes")
    exact(after, talk.ask([*one, *tail, *after.said, *talk.dialect.tool("it was 9")]))
    return "left out of the next prompt, as the template writes it"


def _unicode(talk: Talk) -> str:
    history = [talk.opening(TRICKY)]
    turn = talk.ask(history)
    exact(turn, talk.ask([*history, *turn.said, user("\u0915\u094d\u0937 🇨🇭")]))
    seen = 0
    for limit in range(TRIES):
        history = [talk.opening("Write rare emoji, nothing else.")]
        turn = talk.ask(history, **{_limit(talk.dialect): 1 + limit % 4})
        if "\ufffd" in turn.text:
            exact(turn, talk.ask([*history, *turn.said, user("More.")]))
            seen += 1
    if not seen:
        raise Unseen(f"no answer of {TRIES} ended within a character")
    return f"{seen} answers that end within a character"


def _limit(dialect: Dialect) -> str:
    return next(name for name in dialect.body([]) if name.endswith("_tokens"))


def _edited(talk: Talk) -> str:
    history = [talk.opening("Name a fruit.")]
    turn = talk.ask(history)
    other = [*history, {"role": "assistant", "content": "A pear, I said."}, user("Ok.")]
    edited = talk.ask(other)
    if edited.prompt[: len(turn.context)] == turn.context:
        raise Broken("an edited answer was replaced by the one that the model gave")
    exact(edited, talk.ask([*other, *edited.said, user("Go on.")]))
    exact(turn, talk.ask([*history, *turn.said, user("Ok.")]))
    return "an edited answer, and the given one"


def _counts(talk: Talk) -> str:
    body = talk.body([user("Count me.")])
    counted = {name: body[name] for name in ("model", "messages")}
    count = talk.post("messages/count_tokens", counted)["input_tokens"]
    length = len(talk.ask([user("Count me.")]).prompt)
    if count != length:
        raise Broken(f"count_tokens says {count}, and the prompt has {length}")
    return "count_tokens is the length of the prompt"


def _tokens_in(talk: Talk, generate: bool) -> str:
    """Token ids in, token ids out: of completions, or of vLLM's generate."""
    before = talk.ask([talk.opening("Say something.")])
    ids = [*before.context, *before.prompt[-2:]]
    if generate:
        sampling = {"max_tokens": MAX_TOKENS, "logprobs": 1, "skip_special_tokens": False}
        body: Json = {"model": talk.model, "token_ids": ids, "sampling_params": sampling}
        answer = talk.post("../inference/v1/generate", body)
        entries = answer["choices"][0]["logprobs"]["content"]
        names = [entry.get("token") or f"token_id:{entry['token_id']}" for entry in entries]
        values = [entry["logprob"] for entry in entries]
        sampled = answer["choices"][0]["token_ids"]
        if names != [f"token_id:{token}" for token in sampled]:
            raise Broken(f"the tokens {sampled[:4]} have the names {names[:4]}")
    else:
        body = {"model": talk.model, "prompt": ids, "max_tokens": MAX_TOKENS, "logprobs": 0}
        answer = talk.post("completions", body | {"return_token_ids": True})
        (choice,) = answer["choices"]
        values, sampled = choice["logprobs"]["token_logprobs"], choice["token_ids"]
    prompt = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids") or ids
    if prompt != ids:
        raise Broken(f"the prompt {ids[:4]}... of {len(ids)} tokens became {prompt[:4]}...")
    talk.turns.append(Turn(ids, sampled, values, "", []))
    return _log_probs(talk.turns[-1])


RULES: dict[str, Callable[[Talk], str]] = {
    "tokens": _tokens,
    "turns": _turns,
    "tool results": _tools,
    "sub-agents": _sub_agents,
    "compaction": _compaction,
    "edited answers": _edited,
    "retries": _retries,
    "parallel requests": _parallel,
    "broken streams": _broken_streams,
    "thoughts": _thoughts,
    "Unicode": _unicode,
    "counts": _counts,
}


def mixed(url: str, key: str, seed: int, count: int = 3) -> tuple[list[Finding], list[Turn]]:
    """Check some rules at random, each in a dialect at random, at once and in one session. Return
    what became of them, and the answers.

    Args: as of `check_gateway`; `count` rules.
    """
    rng = random.Random(seed)
    with _client(key) as http, ThreadPoolExecutor(count) as pool:
        talks = [Talk(http, url, "", rng.choice([*DIALECTS.values()])) for _ in range(count)]
        rules = rng.sample([rule for rule in RULES if rule != "counts"], count)

        def one(talk: Talk, rule: str) -> Finding:
            return _finding(talk.dialect.path, rule, RULES[rule], talk)

        findings = list(pool.map(one, talks, rules))
    return findings, [turn for talk in talks for turn in talk.turns]


def _client(key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=16)
    return httpx.Client(timeout=TIMEOUT_S, headers=headers, limits=limits, trust_env=False)


def check_gateway(
    url: str, key: str = "", rows: Callable[[], Sequence[Row]] | None = None
) -> list[Finding]:
    """Return what became of each rule in each dialect.

    Args:
        url: of the server, up to /v1.
        key: its API key.
        rows: what would be trained of these requests, called after them. Each token that the model
            wrote in an answer must be trained in exactly one row, after the tokens that it saw, and
            with its log-prob.
    """
    findings: list[Finding] = []
    turns: list[Turn] = []
    with _client(key) as http:
        url = url.rstrip("/")
        try:
            model = http.get(f"{url}/models").json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{url}/models cannot be read: {type(error).__name__}: {error}"
            ) from None
        for name, dialect in DIALECTS.items():
            talk = Talk(http, url, model, dialect)
            for rule, check in RULES.items():
                if rule == "counts" and name != "messages":
                    continue
                findings.append(_finding(name, rule, check, talk))
                if rule == "tokens" and findings[-1].state == "broken":
                    break
            turns += talk.turns
        talk = Talk(http, url, model, DIALECTS["chat completions"])
        for name in ("completions", "generate"):
            check = partial(_tokens_in, generate=name == "generate")
            findings.append(_finding(name, "tokens", check, talk))
        turns += talk.turns
    if rows is not None:
        findings.append(check_rows(turns, rows()))
    return findings


def check_rows(turns: Sequence[Turn], rows: Sequence[Row]) -> Finding:
    """Return whether each token of an answer is trained once, and none of a prompt."""
    return _finding("all", "rows", lambda _: _rows(turns, rows), None)


def _finding(dialect: str, rule: str, check: Callable[[Any], str], talk: Talk | None) -> Finding:
    try:
        return Finding(dialect, rule, "kept", check(talk))
    except Unseen as unseen:
        return Finding(dialect, rule, "unseen", str(unseen))
    except Broken as broken:
        return Finding(dialect, rule, "broken", str(broken))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        return Finding(dialect, rule, "broken", f"{type(error).__name__}: {error}")


def _rows(turns: Sequence[Turn], rows: Sequence[Row]) -> str:
    """Check that each token of an answer is trained once, and none of a prompt. Raises Broken."""
    for turn in turns:
        begin, end = len(turn.prompt), len(turn.context)
        fits = [row for row in rows if row.ids[:end] == turn.context]
        masks = [row.mask[begin:end] for row in fits]
        trained = [row for row, mask in zip(fits, masks, strict=True) if any(mask)]
        alike = sum(other.context == turn.context for other in turns)
        if len(trained) != alike or not all(all(row.mask[begin:end]) for row in trained):
            raise Broken(
                f"an answer of {end - begin} tokens after {begin} others is in {len(fits)} rows "
                f"and trained {len(trained)} times, with the masks {masks}"
            )
        if turn.log_probs is not None and alike == 1:
            pairs = zip(trained[0].log_probs[begin:end], turn.log_probs, strict=True)
            if not all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in pairs):
                raise Broken(f"an answer's log-probs are others in its row, from token {begin} on")
    for row in rows:
        spans = {
            (len(turn.prompt), len(turn.context))
            for turn in turns
            if row.ids[: len(turn.context)] == turn.context
        }
        wrote = sum(sum(row.mask[begin:end]) for begin, end in spans)
        if spans and wrote != sum(row.mask):
            count = sum(row.mask) - wrote
            raise Broken(f"a row trains {count} tokens that the model did not write")
    return f"{len(turns)} answers in {len(rows)} rows"
