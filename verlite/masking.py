"""Which values are secrets, and texts without them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET = re.compile(
    r"(token|secret|password|passwd|pwd|passphrase|credential|authorization|bearer|key)s?$"
    r"|(secret|private|access)_?key_?(id|path)$"
    r"|pass$|(^|[_-])(auth|pat|cookie)$",
    re.IGNORECASE,
)
"""Last parts of names whose text values are masked: hf_token, serper_key, AWS_SECRET_ACCESS_KEY,
DB_PASS. A number at the end does not count: OPENAI_API_KEY_2."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name such as X_API_KEY_PROD or apiKeyProd."""
SECRET_WORDS = re.compile(r"(secret|password|passwd|passphrase|apikey|pass|key|token)s?")
"""Words that make a name secret wherever they are, as in SECRET_KEY_BASE."""
DESCRIPTIONS = frozenset(
    "at bias budget cache class column count dim dims encoding env fields format head heads id ids "
    "index k len length level limit loss map mask mode name names norm order padding parallelism "
    "path per prob probs proj rate ratio size states template type weight".split()
)
"""Words after which a name is not itself a secret: key_dim, num_key_value_heads, pass_at_k,
token_ids."""
COLUMN = re.compile(
    r"(^|_)(prompt|image|images|video|videos|audio|reward|reward_fn|teacher|student|label|text|"
    r"response|messages|question|answer|input|output|tools|data|source|group|column|sort)_keys?$"
    r"|(^|_)(pad|eos|bos|unk|stop|mask|image|special|added|max|min|num|new)_tokens?$"
    r"|monkeys?$|(?-i:^(OLD)?PWD$)"
    r"|(by|com|sur|tres|over|under|low|high|band|all|one|two|multi|single|first|second|last|each|"
    r"forward|backward)_?pass$",
    re.IGNORECASE,
)
"""Names that only look like secrets: columns of a data set, special tokens, words such as bypass,
and the shell's working directory."""
NUMBER_SECRET = re.compile(r"(secret|password|passwd|pwd|passphrase)s?$", re.IGNORECASE)
"""Names whose numbers are masked too."""
URL_SECRET = re.compile(
    r"(://(?:[^/:@\s]*:)?)[^/\s]+(?=@)"
    r"|([?&#;](?:[\w.-]*[_.-])?(?:api[_-]?key|access_?key|key|token|secret|password|passwd|pwd|pass|"
    r"auth|sig|signature|credential)s?=)[^&\s]+",
    re.IGNORECASE,
)
"""Passwords, keys, tokens and signatures inside a URL."""


def is_secret(key: str, value: Any) -> bool:
    """Return whether a value is a secret, judged by its key. Only for keys outside the schema."""
    name = key.rsplit(".", 1)[-1].rstrip("0123456789").rstrip("_-") or key
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(NUMBER_SECRET.search(name))
    if not isinstance(value, str) or COLUMN.search(name):
        return False
    if SECRET.search(name):
        return True
    words = [word.lower() for word in WORD.findall(name)]
    found = [place for place, word in enumerate(words) if SECRET_WORDS.fullmatch(word)]
    return bool(found) and DESCRIPTIONS.isdisjoint(words[found[-1] :])


def without_secrets(variables: Mapping[str, str], allowed: Iterable[str] = ()) -> dict[str, str]:
    """Return environment variables without those whose names look like secrets'.

    allowed: names that stay nevertheless.
    """
    kept = frozenset(allowed)
    return {k: v for k, v in variables.items() if k in kept or not is_secret(k, v)}


def display(key: str, value: Any, known: bool = False) -> str:
    """Return the value as it is typed, with secrets masked.

    Args:
        key: the dotted key.
        value: its value.
        known: the key belongs to the schema, so the value is not a secret.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{display(f'{key}.{k}', v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(display(key, item, known) for item in value) + "]"
    if not known and is_secret(key, value):
        return "***"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return mask_urls(str(value))


def mask_urls(text: str) -> str:
    """Return the text with *** in place of the passwords and tokens in its URLs."""
    return URL_SECRET.sub(lambda found: f"{found[1] or found[2]}***", text)


ASSIGNED = re.compile(r"""(?<![\w./-])([\w./-]++)(["']?\s*[=:]\s*["']?)([^\s"',;}\])]+)""")
"""NAME=VALUE, name: value and "name": "value" in a text. The time is linear in its length."""
TOKEN = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|xox\w-[\w-]{10,})"
    r"|(?<=Bearer )[\w.=+/-]{8,}|(?<=Basic )[\w=+/-]{4,}"
)
"""Texts that are tokens of well-known services."""


def mask_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return free text, such as a log, with *** in place of secrets.

    Masked are values whose names look like secrets, secrets in URLs, and tokens of well-known
    services.

    Args:
        text: the text.
        environment: variables whose secret values are masked wherever they are.
    """

    def masked(found: re.Match[str]) -> str:
        name, between, value = found.groups()
        try:
            number: Any = float(value)
        except ValueError:
            number = value
        return f"{name}{between}***" if is_secret(name, number) else found[0]

    for name, value in (environment or {}).items():
        if len(value) >= 8 and is_secret(name, value):
            text = text.replace(value, "***")
    return ASSIGNED.sub(masked, TOKEN.sub("***", mask_urls(text)))
