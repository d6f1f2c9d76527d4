"""Whether an engine is installed that a plug-in is for, and the one line where it is and lacks what the plug-in is made of."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys


def is_installed(package: str, unless: str) -> bool:
    """`unless`: a variable of the environment by which tests do without. A folder of that name in the way of imports is no package."""
    if os.environ.get(unless):
        return False
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it is imported already, and does not say from where
        return True
    return spec is not None and spec.origin is not None


def lacking(engine: str, package: str, known: str, error: ImportError) -> ImportError:
    """`known`: its versions that the plug-in was made for."""
    return ImportError(
        f"kvtier: {engine} {_version(package)} lacks what the plug-in is made of ({error}); kvtier knows {engine} {known}: "
        "install one of them, or start the engine without kvtier"
    )


def _version(package: str) -> str:
    said = getattr(sys.modules.get(package), "__version__", None)
    try:
        return str(said or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
