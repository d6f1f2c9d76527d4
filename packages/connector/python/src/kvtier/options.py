"""Options that an engine's configuration gives its plug-in, validated: what is not known is refused at the start, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

#: Of a Unix socket's address, without the byte that ends it.
MAX_SOCKET_BYTES = 107

_Options = TypeVar("_Options")


class BadOptions(ValueError):
    """Says which key, and what it may be."""


def parsed(
    kind: type[_Options], given: Mapping[str, Any], numbers: Mapping[str, tuple[float, float]], where: str, version: str
) -> _Options:
    """
    ``kind`` made of what is given: a dataclass with ``socket``, ``weights_digest`` and ``accept_versions`` among its fields. ``numbers``:
    the least and the most of each number, which is whole where its default is. ``version``: an example. BadOptions begins with ``where``.
    """
    extra = dict(given)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key, value in extra.items():
        field = known.get(key)
        if field is None:
            raise BadOptions(f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}")
        if key == "accept_versions":
            if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
                raise BadOptions(f'{where}: accept_versions is a list such as ["{version}"], not {value!r}')
            extra[key] = tuple(value)
        elif key in numbers:
            low, high = numbers[key]
            is_share = isinstance(field.default, float)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high or not (is_share or float(value).is_integer()):
                what = "number" if is_share else "whole number"
                raise BadOptions(f"{where}: {key} is a {what} from {low} to {high}, not {value!r}")
            extra[key] = float(value) if is_share else int(value)
        elif isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise BadOptions(f"{where}: {key} is true or false, not {value!r}")
        elif not isinstance(value, str):
            raise BadOptions(f"{where}: {key} is a text, not {value!r}")
    if not extra.get("socket"):
        raise BadOptions(f'{where}: "socket" is missing: the Unix socket of the cache node, e.g. "/run/kvtier/node.sock"')
    if (length := len(extra["socket"].encode())) > MAX_SOCKET_BYTES:
        raise BadOptions(f"{where}: socket: a Unix socket's path has at most {MAX_SOCKET_BYTES} bytes, this one {length}")
    digest = extra.get("weights_digest", "")
    if digest and (len(digest) != 64 or any(c not in "0123456789abcdef" for c in digest)):
        raise BadOptions(f"{where}: weights_digest is 64 hex digits in lower case, not {digest!r}")
    return kind(**extra)
