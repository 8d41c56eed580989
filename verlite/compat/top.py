"""verl and verl.protocol: DataProto, imported when it is used, because it needs torch."""

from typing import Any

NAMES = ("DataProto", "DataProtoItem")


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"verlite's compatibility package for verl has no {name!r}")
    from verlite.protocol import data

    return getattr(data, name)
