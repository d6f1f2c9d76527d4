"""The versions of vLLM that are known here, and what differs between them: one table, looked at once, when the scheduler's half or a
worker's half is made. What can be felt for is felt for (`Features`); the table says which versions were looked at.

A version that is not in the table is not served: its KV may mean something else. One line says so, and all is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Version:
    minor: str
    #: What was read or run.
    looked_at: str
    notes: str
    #: An engine of it served with this connector, and was compared with one without.
    was_run: bool = False


#: The newest last. docs/vllm.md has the same rows.
KNOWN: tuple[Version, ...] = (
    Version("0.27", "main of 14 August 2026, run on a CPU", "one tensor a layer; hybrid failures end the engine", True),
    Version("0.28", "threads and documentation", "as 0.27"),
    Version("0.29", "threads and documentation", "one allocation with as_strided views; hybrid failures are recomputed; tables are told"),
    Version("0.30", "threads and single files", "failures by request; tables are asked for"),
    Version("0.31", "threads and single files", "as 0.30; salted and media prompts have other names"),
)

_MINOR = re.compile(r"^v?(\d+)\.(\d+)")


def find(version: str | None, accept: tuple[str, ...] = ()) -> Version | None:
    """The row of a version; None for one that is not known. No vLLM at all (the contract test): the newest row.

    `accept`: minor versions that the operator vouches for; they get the newest row.
    """
    if version is None:
        return KNOWN[-1]
    match = _MINOR.match(version)
    if match is None:
        return None
    minor = f"{match[1]}.{match[2]}"
    row = next((row for row in KNOWN if row.minor == minor), None)
    if row is None and minor in accept:
        return KNOWN[-1]
    return row


def refusal(version: str | None) -> str:
    known = ", ".join(row.minor for row in KNOWN)
    return (
        f"vLLM {version} is not one of the versions that are known ({known}): nothing is loaded or stored. "
        'Install one of them, or vouch for it with "accept_versions" in kv_connector_extra_config'
    )


def caution(version: str | None, row: Version) -> str:
    """What is to be said of a version that was never run; "": nothing."""
    if version is None or row.was_run:
        return ""
    run = ", ".join(one.minor for one in KNOWN if one.was_run)
    return (
        f"vLLM {version} was never run with this connector ({row.minor}: {row.looked_at}; run was {run}): it serves, and its layouts are "
        "checked by a canary; compare answers with an engine without it first"
    )


def told_table(scheduler_output: Any, name: str) -> Any | None:
    """A request's blocks as the engine has them in this step; None where it does not say: below 0.29, and of who is not scheduled.

    From 0.30 on a table is put together when it is asked for: who needs none should not ask.
    """
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    if state is None:
        return None
    ask = getattr(state, "get_block_ids", None)
    if ask is not None:
        return ask(name)
    tables = getattr(state, "block_ids", None)
    return tables.get(name) if tables is not None else None
