"""The digest of a model's weights by content: the same path with other weights is another model.

    python -m kvtier.weights FOLDER [FOLDER OF THE DRAFT MODEL]      prints it, as `weights_digest` takes it

A file's digest is kept beside what the file system says of the file, so that a start does not read 100 GB again; what is not known is read
beside serving, and until then there is no namespace: misses. Invariant: a digest is used only for the very file state under which it was
computed, seen before and after reading.

What is trusted: a file of the same name, inode, size, time of its last write and time of its last change, to the nanosecond, that has the
same bytes in some places, is the same file. The device's number is no part of it: a volume gets another one each time that it is mounted.
The time of the last change is: no program can set it, as `cp -p` and archives set that of the last write. Who may write the kept digests
may name any weights: they are as trusted as the weights themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

from kvtier.namespace import fingerprint
from kvtier.threads import start

log = logging.getLogger("kvtier")

#: Of a folder, what its weights are made of. Consolidated copies of the same weights count, too: the engine may read either.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
#: Where digests are kept, by the environment; an engine's option `weights_cache` goes before it.
CACHE_VARIABLE = "KVTIER_WEIGHTS_CACHE"
_CACHE_NAME = "weights.json"
_READERS = 4
_CHUNK_BYTES = 8 << 20
_CACHED_FILES = 4096
#: Pieces that are read of each file at each start: some file systems make inodes and times up.
_PIECES = 32
_PIECE_BYTES = 4096
#: Of a file that was changed just now no digest is kept: another change in the same tick of its file system's clock would not be seen.
_SETTLED_NS = 2_000_000_000
#: The command line cannot work (EX_CONFIG).
_EXIT_CONFIG = 78


class WeightsMissing(Exception):
    """There is nothing to make a digest of; the text says what to do."""


def weight_files(folder: str | os.PathLike[str], beside: bool = False) -> list[Path]:
    """Sorted by name. A single file stands for itself. `beside`: of weights that another program lays out as it likes; where no file is named
    as weights are, all of them are."""
    path = Path(folder)
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if beside and not files:
        files = sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        remedy = 'name the folder that has them, or give their digest as "weights_digest"'
        raise WeightsMissing(f"{path}: no weights ({', '.join(SUFFIXES)}) lie there; {remedy}")
    return files


def cache_file(place: str | os.PathLike[str]) -> Path:
    """`place`: a folder, or a file: one that is there, or is called .json."""
    path = Path(place)
    return path if path.suffix == ".json" or os.path.isfile(path) else path / _CACHE_NAME


def default_cache_path() -> Path | None:
    """By CACHE_VARIABLE, else below the user's own caches. A container loses the latter: a volume keeps the former. None: nowhere, the user
    has no home."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return cache_file(named)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "kvtier", _CACHE_NAME) if os.path.isabs(caches) else None


def _state(path: Path) -> list[int]:
    """What of a file stays when its volume is mounted again, and does not when it is written."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _key(name: str, path: Path) -> str:
    """Of a file as it is now."""
    state = _state(path)
    size, pieces = state[1], hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for i in range(_PIECES):
            pieces.update(os.pread(file.fileno(), _PIECE_BYTES, i * max(0, size - _PIECE_BYTES) // (_PIECES - 1)))
    return f"{' '.join(map(str, state))} {pieces.hexdigest()[:32]} {name}"


def _read_cache(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: digest for key, digest in found.items() if isinstance(digest, str) and len(digest) == 64}


def _write_cache(path: Path | None, entries: dict[str, str]) -> None:
    """Renamed into place; what another process wrote meanwhile is kept. A cache that cannot be written costs time only."""
    name = ""
    try:
        if path is None:
            raise OSError("there is no home")
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {**_read_cache(path), **entries}
        for key in list(merged)[: max(0, len(merged) - _CACHED_FILES)]:
            del merged[key]
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".weights-")
        with os.fdopen(handle, "w") as file:
            json.dump(merged, file)
            os.fchmod(file.fileno(), 0o644)  # no secret, and a volume may be of pods with users of their own
        os.replace(name, path)
    except OSError as error:
        log.warning(
            'kvtier: digests of weights cannot be kept (%s): each start reads them all; name a folder that stays as "weights_cache"', error
        )
        if name:
            Path(name).unlink(missing_ok=True)


def _hash_file(path: Path, stopped: threading.Event) -> str:
    """SHA-256 of a file. hashlib lets go of the interpreter's lock."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if stopped.is_set():
                raise WeightsMissing("stopped")
            digest.update(chunk)
    return digest.hexdigest()


def _by_threads(digest: Callable[[str, Path], str], names: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Of all files, in their order. The end of the interpreter waits for none of these threads: a pool's would read what is left before.
    @raises OSError where the system has no thread for it; what `digest` raises first"""
    digests = [""] * len(files)
    errors: list[BaseException] = []
    left, lock = iter(range(len(files))), threading.Lock()

    def read() -> None:
        while not errors:
            with lock:
                i = next(left, None)
            if i is None:
                return
            try:
                digests[i] = digest(names[i], files[i])
            except BaseException as error:  # no digest is made of what was not read
                errors.append(error)

    threads: list[threading.Thread] = []
    for _ in range(min(_READERS, len(files))):
        thread = threading.Thread(target=read, name="kvtier-weights", daemon=True)
        try:
            start(thread)
        except OSError:
            if not threads:
                raise
            break
        threads.append(thread)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return digests


def weights_digest(
    folders: Iterable[str | os.PathLike[str]],
    cache: Path | None = None,
    stopped: threading.Event | None = None,
    on_read: Callable[[Path], None] = lambda path: None,
    beside: Iterable[str | os.PathLike[str]] = (),
) -> bytes:
    """32 bytes over names and contents of all weight files; `on_read` hears of each file that had to be read. `beside`: folders
    behind those of the models, see `weight_files`. @raises WeightsMissing; OSError for what the system refuses now"""
    stopped = stopped or threading.Event()
    cache = default_cache_path() if cache is None else cache_file(cache)
    known = _read_cache(cache)
    found: dict[str, str] = {}

    def one(name: str, path: Path) -> str:
        real = path.resolve()
        before, began, key = _state(real), time.time_ns(), _key(name, real)
        digest = known.get(key)
        if digest is None:
            on_read(path)
            digest = _hash_file(real, stopped)
            if _state(real) != before:
                raise WeightsMissing(f"{path} changed while it was read; start the engine again when it is whole")
            if began - before[3] > _SETTLED_NS:
                found[key] = digest
        return digest

    parts = []
    for folder, other in [*((one, False) for one in folders), *((one, True) for one in beside)]:
        base = Path(folder)
        files = weight_files(base, other)
        names = [str(path.relative_to(base)) if path != base else path.name for path in files]
        parts.append([list(each) for each in zip(names, _by_threads(one, names, files))])
    if found:
        _write_cache(cache, found)
    return fingerprint("kvtier-weights-1", {"models": parts})


def local_folder(name: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Where a model lies on this machine: a path, or a name of a hub whose copy is here. Nothing is downloaded.

    @raises WeightsMissing; OSError where its file system does not answer now
    """
    try:
        os.stat(name)
        return name
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        pass  # the name of a hub
    try:
        from huggingface_hub import snapshot_download  # type: ignore[import-not-found]

        return str(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        _ask_hub_cache(name, download_dir)  # whatever it was, the hub's own code says that there is no copy
        raise WeightsMissing(
            f'the weights of {name} are not found on this machine ({error}); give "weights_digest", 64 hex digits that stand for them'
        ) from error


def _ask_hub_cache(name: str, download_dir: str | None) -> None:
    """@raises OSError where the file system of the hub's copies does not answer now, so that nobody knows whether there is one"""
    try:
        root = download_dir or import_module("huggingface_hub").constants.HF_HUB_CACHE
    except (ImportError, AttributeError):
        return
    for folder in (root, os.path.join(root, f"models--{name.replace('/', '--')}")):
        try:
            os.stat(folder)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return


def main(arguments: Sequence[str]) -> int:
    """What an engine that serves these folders makes of them by itself: pods with the digest share blocks with pods without."""
    if not arguments or any(argument.startswith("-") for argument in arguments):
        print("kvtier: usage: python -m kvtier.weights FOLDER [FOLDER OF THE DRAFT MODEL]", file=sys.stderr)
        return _EXIT_CONFIG
    missing = next((argument for argument in arguments if not os.path.exists(argument)), None)
    if missing is not None:
        print(f"kvtier: {missing} is not there; name the folder that the model lies in", file=sys.stderr)
        return _EXIT_CONFIG
    status = _EXIT_CONFIG
    try:
        for argument in arguments:
            weight_files(argument)
        status = 1  # what goes wrong from here on may go well another time
        print(weights_digest(arguments).hex())
        return 0
    except WeightsMissing as error:
        print(f"kvtier: {error}", file=sys.stderr)
    except OSError as error:
        print(f"kvtier: the weights cannot be read ({error})", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
