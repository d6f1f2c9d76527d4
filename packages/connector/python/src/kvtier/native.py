"""The one mirror of packages/connector/native/cc/kvtier.h: same names, same order. Loaded at the first use, and not at import."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

from .errors import KvError

ABI = 3
#: Of a block, what became of it.
BAD, GOOD, MISSED = 0, 1, 2
_CODES = {-1: "CONFIG", -2: "SETUP", -3: "PROTOCOL", -4: "BUSY", -5: "UNKNOWN"}


class Options(Structure):
    _fields_ = [(name, c_uint32) for name in ("load_threads", "store_threads", "store_niceness", "max_jobs", "device_deadline_ms")]


class Part(Structure):
    _fields_ = [(name, c_uint64) for name in ("base", "stride", "rows", "row_stride", "row_bytes")]


class Counts(Structure):
    _fields_ = [
        (name, c_uint64)
        for name in (
            "arenas",
            "layouts",
            "jobs",
            "quarantined",
            "loaded_blocks",
            "loaded_bytes",
            "stored_blocks",
            "stored_bytes",
            "checked_blocks",
            "bad_blocks",
            "pinned_bytes",
            "pins_refused",
            "bounced_bytes",
            "late_blocks",
            "hung",
            "standing",
        )
    ]


_U64S = POINTER(c_uint64)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "kvtier_abi": (c_uint32, []),
    "kvtier_version": (c_char_p, []),
    "kvtier_last_error": (c_char_p, []),
    "kvtier_copy_code": (c_char_p, []),
    "kvtier_open": (c_void_p, [POINTER(Options)]),
    "kvtier_close": (c_int32, [c_void_p, c_int64]),
    "kvtier_map": (c_int64, [c_void_p, c_char_p, c_uint64, c_uint64, c_uint64]),
    "kvtier_unmap": (c_int32, [c_void_p, c_int64]),
    "kvtier_layout": (c_int64, [c_void_p, POINTER(Part), c_size_t, c_uint64]),
    "kvtier_payload_bytes": (c_uint64, [c_void_p, c_int64]),
    "kvtier_forget_layout": (c_int32, [c_void_p, c_int64]),
    "kvtier_device_layout": (c_int64, [c_void_p, c_int32, POINTER(Part), c_size_t, c_uint64]),
    "kvtier_mark": (c_int64, [c_void_p, c_int32, c_void_p]),
    "kvtier_forget_mark": (c_int32, [c_void_p, c_int64]),
    "kvtier_pinning": (c_int32, [c_void_p, c_int64, c_int32]),
    "kvtier_peek": (c_int32, [c_void_p, c_int32, c_char_p, c_uint64, c_size_t]),
    "kvtier_poke": (c_int32, [c_void_p, c_int32, c_uint64, c_char_p, c_size_t]),
    "kvtier_load": (c_int64, [c_void_p, c_int64, c_int64, c_size_t, _U64S, _U64S, _U64S, c_int64]),
    "kvtier_store": (c_int64, [c_void_p, c_int64, c_int64, c_size_t, _U64S, _U64S, c_int64]),
    "kvtier_check": (c_int64, [c_void_p, c_int64, c_uint64, c_size_t, _U64S, _U64S]),
    "kvtier_wait": (c_int32, [c_void_p, c_int64, c_int64]),
    "kvtier_take": (c_int32, [c_void_p, c_int64, _U64S, POINTER(c_uint8), c_size_t]),
    "kvtier_abandon": (c_int32, [c_void_p, c_int64]),
    "kvtier_count": (None, [c_void_p, POINTER(Counts)]),
}

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
#: Called with the interpreter held: they end at once, and whoever lets go of it on an engine's loop gets it back late.
_AT_ONCE = ("kvtier_wait", "kvtier_take")
_held: ctypes.PyDLL | None = None


def _path() -> Path:
    named = os.environ.get("KVTIER_LIBRARY")
    if named:
        return Path(named)
    beside = Path(__file__).with_name("libkvtier.so")
    if not beside.exists():
        for folder in Path(__file__).resolve().parents[5:6]:  # a checkout
            built = folder / "build/client/libkvtier.so"
            if built.exists():
                return built
    return beside


def library() -> ctypes.CDLL:
    """KvError SETUP when it is not there or of another version."""
    global _loaded, _held
    with _lock:
        if _loaded is None:
            path = _path()
            if "/" in str(path) and not path.exists():  # a name alone is the loader's to find
                remedy = "KVTIER_LIBRARY names it" if os.environ.get("KVTIER_LIBRARY") else "install kvtier's wheel, or run: npm run build"
                raise KvError("SETUP", f"{path}: the library is not there; {remedy}")
            try:
                loaded, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
                for name, (result, arguments) in _SIGNATURES.items():
                    for one in (loaded, held) if name in _AT_ONCE else (loaded,):
                        function = getattr(one, name)
                        function.restype = result
                        function.argtypes = arguments
            except (OSError, AttributeError) as error:
                what = f"is not the library of this version, or not for {platform.machine()}"
                raise KvError("SETUP", f"{path}: {what} ({error}); install kvtier's wheel again") from error
            if loaded.kvtier_abi() != ABI:
                raise KvError("SETUP", f"{path}: speaks ABI {loaded.kvtier_abi()}, not {ABI}; install kvtier's wheel again")
            _loaded, _held = loaded, held
        return _loaded


def at_once() -> ctypes.PyDLL:
    """The same library, for calls of `_AT_ONCE` that are not to wait."""
    library()
    assert _held is not None
    return _held


def check(status: int) -> int:
    """A status of the library, or KvError with its line."""
    if status >= 0:
        return status
    assert _loaded is not None
    line = _loaded.kvtier_last_error().decode(errors="replace")
    code = _CODES.get(status, "SETUP")
    raise KvError(code, line.split(": ", 1)[-1], retry=code == "BUSY")
