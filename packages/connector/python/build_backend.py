#!/usr/bin/env python3
"""Builds wheel and package of sources with nothing but Python's own library (PEP 517), so that neither network nor tools are needed.

    build_backend.py FOLDER      both into FOLDER; from a checkout: npm run python:wheel

The wheel carries libkvtier.so: that of KVTIER_LIBRARY, else that of the checkout's build, else it is compiled from the sources beside
this file (CMake, a C++20 compiler, xxhash.h). One wheel serves every Python: the library knows none.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Of a checkout; in the package of sources a folder that has none of it.
ROOT = (HERE / "../../..").resolve()
#: Of the entries in what is built: the same sources make the same bytes.
DATE = (2020, 1, 1, 0, 0, 0)
DATE_S = 1_577_836_800
#: By ELF's numbers, as wheels call them.
MACHINES = {62: "x86_64", 183: "aarch64"}
DATA_PLANE = ("arena.cc", "arena.h", "block_copy.cc", "block_copy.h", "lock_byte.h", "xxh3.h")
#: Copies of a GPU's memory: the executor's.
CUDA = (
    *(f"gpu/{name}" for name in ("device.h", "driver.h", "gpu.h", "gpu_driver.cc", "numeric.h", "pin_remedy.h", "poll.h")),
    *(f"kernels/{name}" for name in ("block_copy.cu", "kernels.h", "transfer.ptx", "transfer_kernels.h")),
    *(f"kernels/{name}" for name in ("xxh3.cu", "xxh3.cuh", "xxh3_apart.cu")),
    *(
        f"transfer/{name}.{end}"
        for name in ("copy_channel", "copy_plan", "host_arena", "kernel_loading", "paths", "transfers")
        for end in ("cc", "h")
    ),
)


def _project(key: str) -> str:
    text = (HERE / "pyproject.toml").read_text()
    found = re.search(rf'^{key} = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, key
    return found[1]


def _dependencies() -> list[str]:
    found = re.search(r"^dependencies = \[(.*)\]$", (HERE / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


def _entry_points() -> str:
    found = re.findall(r'^\[project\.entry-points\."([^"]+)"\]\n((?:.+\n)+)', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return "\n".join(f"[{group}]\n" + lines.replace('"', "") for group, lines in found)


def _metadata() -> str:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {_project('name')}",
        f"Version: {_project('version')}",
        f"Summary: {_project('description')}",
        "License: Apache-2.0",
        f"Requires-Python: {_project('requires-python')}",
        *[f"Requires-Dist: {name}" for name in _dependencies()],
    ]
    return "\n".join(lines) + "\n"


def _library() -> bytes:
    named = os.environ.get("KVTIER_LIBRARY")
    built = [Path(named)] if named else [ROOT / "build/client/libkvtier.so"] if _is_checkout() else []
    for path in built:
        if not path.exists():
            raise SystemExit(f"kvtier: {path} is not there; run: npm run build")
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        commands = (
            ["cmake", "-S", str(HERE / "native/cc"), "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_UNITY_BUILD=ON"],
            ["cmake", "--build", folder],
        )
        for command in commands:
            try:
                subprocess.run(command, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"kvtier: the library cannot be compiled here ({error}); install the wheel, or CMake, g++ and libxxhash-dev"
                ) from error
        return (Path(folder) / "libkvtier.so").read_bytes()


def _is_checkout() -> bool:
    return (ROOT / "packages/base/data-plane/cc/arena.h").exists()


def _tag(library: bytes) -> str:
    """The oldest C library that has all that ours asks for, and the machine that it is for, which need not be this one."""
    minor = max(int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", library))
    number = int.from_bytes(library[18:20], "little")
    if library[:4] != b"\x7fELF" or number not in MACHINES:
        raise SystemExit(f"kvtier: libkvtier.so is not a library for any of {', '.join(MACHINES.values())}; build it again")
    return f"py3-none-manylinux_2_{minor}_{MACHINES[number]}"


def _license() -> bytes:
    return (ROOT / "LICENSE" if _is_checkout() else HERE / "LICENSE").read_bytes()


def _modules() -> list[Path]:
    source = HERE / "src"
    files = [path for path in source.rglob("*") if path.suffix == ".py" or path.name == "py.typed"]
    return sorted(path.relative_to(source) for path in files if "__pycache__" not in path.parts)


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    library = _library()
    name, version, tag = _project("name"), _project("version"), _tag(library)
    info = f"{name}-{version}.dist-info"
    about = f"Wheel-Version: 1.0\nGenerator: {name}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files: list[tuple[str, bytes]] = [(str(path), (HERE / "src" / path).read_bytes()) for path in _modules()]
    files += [
        (f"{name}/libkvtier.so", library),
        (f"{info}/LICENSE", _license()),
        (f"{info}/METADATA", _metadata().encode()),
        (f"{info}/entry_points.txt", _entry_points().encode()),
        (f"{info}/WHEEL", about.encode()),
    ]
    record = []
    for path, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(data)}\n")
    files.append((f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode()))
    file = f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / file, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files:
            entry = zipfile.ZipInfo(path, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            wheel.writestr(entry, data)
    return file


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    name, version = _project("name"), _project("version")
    files: dict[str, bytes] = {"PKG-INFO": _metadata().encode(), "LICENSE": _license()}
    for path in ("pyproject.toml", "build_backend.py"):
        files[path] = (HERE / path).read_bytes()
    for module in _modules():
        files[f"src/{module}"] = (HERE / "src" / module).read_bytes()
    native = HERE.parent / "native/cc" if _is_checkout() else HERE / "native/cc"
    plane = ROOT / "packages/base/data-plane/cc" if _is_checkout() else HERE / "native/data-plane"
    for source in sorted(native.iterdir()):
        if source.is_file():
            files[f"native/cc/{source.name}"] = source.read_bytes()
    for part in DATA_PLANE:
        files[f"native/data-plane/{part}"] = (plane / part).read_bytes()
    cuda = ROOT / "packages/engine/cuda" if _is_checkout() else HERE / "native/cuda"
    for part in CUDA:
        files[f"native/cuda/{part}"] = (cuda / part).read_bytes()
    file = f"{name}-{version}.tar.gz"
    with tarfile.open(Path(sdist_directory) / file, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size, entry.mtime, entry.mode = len(data), DATE_S, 0o644
            archive.addfile(entry, io.BytesIO(data))
    return file


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


def get_requires_for_build_sdist(config_settings: object = None) -> list[str]:
    return []


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    for built in (build_wheel(str(target)), build_sdist(str(target))):
        print(target / built)
