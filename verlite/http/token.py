"""The bearer token that a service may ask of its clients (RFC 6750).

A token comes from an environment variable or a file and never from the command line, which other
users of the machine can read.
"""

import os
from pathlib import Path


class TokenError(ValueError):
    """A token cannot be read or used. The message has the remedy and never the token."""


def token_of_variable(name: str, key: str) -> str:
    """Return the token in an environment variable. `key` is the setting that names the variable.

    Raises:
        TokenError: the variable is not set or its value is not a token.
    """
    value = os.environ.get(name)
    if value is None:
        raise TokenError(
            f"{key}={name}: this environment variable is not set in this process. Set it where "
            "the process starts; ray_kwargs.ray_init.runtime_env.env_vars reaches all workers"
        )
    return _checked(value, f"{key}={name}: this environment variable")


def token_of_file(path: str, key: str) -> str:
    """Return the token in a file, without white space around it.

    Raises:
        TokenError: the file cannot be read or its text is not a token.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise TokenError(f"{key}={path}: the file cannot be read: {reason}") from None
    return _checked(text, f"{key}={path}: the file")


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        raise TokenError(f"{where} has no token; write one, such as the output of openssl rand")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise TokenError(f"{where} has characters that a token cannot have; use letters and digits")
    return token
