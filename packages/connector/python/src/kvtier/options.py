"""Options that an engine's configuration gives its plug-in, validated: what is not known is refused at the start, in one line."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvtier.weights import CACHE_VARIABLE

#: Of a Unix socket's address, without the byte that ends it.
MAX_SOCKET_BYTES = 107
#: As the system has them; the last is nobody's.
_MAX_GROUP = 2**32 - 2
_GROUP = re.compile(r"[^:\s]{1,64}", re.ASCII)

_Options = TypeVar("_Options")


class BadOptions(ValueError):
    """Says which key, and what it may be."""


def nearest(key: str, known: Iterable[str]) -> str:
    """What to ask in brackets, or "". Also of a key as others write it: `arenaDir`, `arena-dir`."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).replace("-", "_").lower()
    found = difflib.get_close_matches(plain, list(known), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _group(value: Any, where: str) -> str:
    """A name, or a number in either form: a node's configuration has it as a number, containers share nothing else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_GROUP:
        return str(value)
    if isinstance(value, str) and (not value or _GROUP.fullmatch(value)) and not (value.isdecimal() and int(value) > _MAX_GROUP):
        return value
    raise BadOptions(f"{where}: group is the name of a group or its number, not {value!r}")


def _cache(value: str, where: str, key: str) -> None:
    if value and not os.path.isabs(value):
        raise BadOptions(f"{where}: {key} is the whole path of a folder, or of a file .json, not {value!r}")


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
            raise BadOptions(f"{where}: unknown key {key!r}{nearest(str(key), known)}; known are {', '.join(sorted(known))}")
        if key == "group":
            extra[key] = _group(value, where)
        elif key == "accept_versions":
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
    _cache(extra.get("weights_cache", ""), where, "weights_cache")
    _cache(os.environ.get(CACHE_VARIABLE, ""), where, f"{CACHE_VARIABLE} (environment)")
    return kind(**extra)
