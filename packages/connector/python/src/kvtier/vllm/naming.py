"""The connectors by name, in vLLM's own list of them: its MultiConnector looks there for whose statistics came, in the API server, where no
connector is made. A name that is not there ends every request of that server. vLLM loads this by the entry point
"vllm.general_plugins" of the wheel; each connector's module does so, too, for who has put the package in place without one.

Invariant: nothing raises. What the list is for otherwise does not change: a name that comes with a `kv_connector_module_path` is looked
for there.
"""

from __future__ import annotations

import logging
import os

CONNECTORS = {"KvtierConnector": "kvtier.vllm.connector", "KvtierOffloadingConnector": "kvtier.vllm.offloading"}

log = logging.getLogger("kvtier.vllm")


def register() -> None:
    """Any number of times."""
    if os.environ.get("KVTIER_WITHOUT_VLLM"):
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # type: ignore[import-not-found]
    except Exception as error:  # no vLLM, or none that knows connectors
        log.debug("kvtier: vLLM has no list of connectors (%s)", error)
        return
    for name, module in CONNECTORS.items():
        try:
            KVConnectorFactory.register_connector(name, module, name)
        except ValueError:  # it is there
            continue
        except Exception as error:
            log.warning("kvtier: vLLM's list of connectors does not take %s (%s); keep it out of a MultiConnector", name, error)
