"""The digest of a model's weights by content: the same path with other weights is another model.

A file's digest is kept beside its device, inode, size and times, so that a start does not read 100 GB again; what is not
known is read beside serving, and until then there is no namespace: misses. Invariant: a digest is used only for the very
file state under which it was computed, seen before and after reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.namespace import fingerprint

#: Of a folder, what its weights are made of. Consolidated copies of the same weights count, too: the engine may read either.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_READERS = 4
_CHUNK_BYTES = 8 << 20
_CACHED_FILES = 4096


class WeightsMissing(Exception):
    """There is nothing to make a digest of; the text says what to do."""


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Sorted by name. A single file stands for itself."""
    path = Path(folder)
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise WeightsMissing(f"{path}: no weights ({', '.join(SUFFIXES)}) lie there; give their digest as \"weights_digest\"")
    return files


def default_cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier" / "weights.json"


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _read_cache(path: Path) -> dict[str, list]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    sound = lambda entry: (  # noqa: E731
        isinstance(entry, list) and len(entry) == 6 and isinstance(entry[5], str) and len(entry[5]) == 64
    )
    return {key: entry for key, entry in found.items() if sound(entry)}


def _write_cache(path: Path, entries: dict[str, list]) -> None:
    """Renamed into place; what another process wrote meanwhile is kept. A cache that cannot be written costs time only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {**_read_cache(path), **entries}
        for key in list(merged)[: max(0, len(merged) - _CACHED_FILES)]:
            del merged[key]
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".weights-")
        with os.fdopen(handle, "w") as file:
            json.dump(merged, file)
        os.replace(name, path)
    except OSError:
        pass


def _hash_file(path: Path, stopped: threading.Event) -> tuple[list[int], str]:
    """SHA-256 of a file that does not change meanwhile. hashlib lets go of the interpreter's lock."""
    before = _state(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if stopped.is_set():
                raise WeightsMissing("stopped")
            digest.update(chunk)
    if _state(path) != before:
        raise WeightsMissing(f"{path} changed while it was read; start the engine again when it is whole")
    return before, digest.hexdigest()


def weights_digest(
    folders: Iterable[str | os.PathLike[str]],
    cache: Path | None = None,
    stopped: threading.Event | None = None,
    on_read: Callable[[Path], None] = lambda path: None,
) -> bytes:
    """32 bytes over names and contents of all weight files; `on_read` hears of each file that had to be read."""
    stopped = stopped or threading.Event()
    cache = cache or default_cache_path()
    known = _read_cache(cache)
    found: dict[str, list] = {}

    def one(path: Path) -> tuple[str, str]:
        real = path.resolve()
        entry = known.get(str(real))
        state = _state(real)
        if entry is None or entry[:5] != state:
            on_read(path)
            state, digest = _hash_file(real, stopped)
            entry = [*state, digest]
            found[str(real)] = entry
        return path.name, entry[5]

    parts = []
    with ThreadPoolExecutor(_READERS, thread_name_prefix="kvtier-weights") as pool:
        for folder in folders:
            base = Path(folder)
            files = weight_files(base)
            names = [str(path.relative_to(base)) if path != base else path.name for path in files]
            parts.append([[name, digest] for name, (_, digest) in zip(names, pool.map(one, files))])
    if found:
        _write_cache(cache, found)
    return fingerprint("kvtier-weights-1", {"models": parts})


def local_folder(name: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Where a model lies on this machine: a path, or a name of a hub whose copy is here. Nothing is downloaded."""
    if os.path.exists(name):
        return name
    try:
        from huggingface_hub import snapshot_download  # type: ignore[import-not-found]

        return str(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        raise WeightsMissing(
            f'the weights of {name} are not found on this machine ({error}); give "weights_digest", 64 hex digits that stand for them'
        ) from error
