"""How an engine makes of an image or a video what its model sees. vLLM's hashes of media have the item, what a request says itself, and how
an image's colours were converted. They have nothing else of the engine's own settings, nor of the processor's files beside the weights: the
same item would be other KV under one name.

Invariant: of a model without media there is nothing, nor of a setting that is the default; and what vLLM writes into these settings while it
starts is no part of a name, however far it has come.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.vllm import decisions
from kvtier.vllm.groups import Unsupported
from kvtier.weights import WeightsMissing, local_folder

log = logging.getLogger("kvtier.vllm")

#: What a model's folder says of its processors.
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: They have some KiB.
_MOST_BYTES = 4 << 20
#: A chat's tokens are in the hashes.
_NO_MEDIA = "chat_template"
_SETTINGS = ("media_io_kwargs", "mm_encoder_attn_dtype")
#: Where a processor runs when nobody says so.
_AT_HOME = (None, "cpu", "auto")
#: Where the model does it, vLLM sets these to false in the settings that it was given, once they are used, whatever was said of them.
_OF_THE_MODEL = ("do_normalize", "do_rescale")


def _text(value: Any) -> str:
    return json.dumps(decisions.plain(value), sort_keys=True)


def _file(path: Path) -> str | None:
    """None: there is none. @raises OSError where its file system does not answer now; Unsupported"""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > _MOST_BYTES:
        raise Unsupported(f"{path} has more than {_MOST_BYTES >> 20} MiB: no processor is set up by so much")
    try:
        said = json.loads(data)
    except ValueError as error:
        raise Unsupported(f"{path} is no JSON ({error})") from error
    return _text({key: value for key, value in said.items() if key != _NO_MEDIA} if isinstance(said, dict) else said)


def _files(folder: str) -> list[Sequence[str]]:
    found = ((name, _file(Path(folder, name))) for name in _FILES)
    return [[name, text] for name, text in found if text is not None]


def _scales(path: str) -> str:
    """By content: the same scales may lie elsewhere, and others in the same place. @raises OSError, Unsupported"""
    text = _file(Path(path))
    if text is None:
        raise Unsupported(f"{path} is not there, and an encoder's scales are of it (mm_encoder_fp8_scale_path)")
    return text


def can_be_named(vllm_config: Any) -> bool:
    """False, and said so: an encoder in fp8 without a file of scales makes them of the items that it saw before, and no name says of which."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(media, "mm_encoder_attn_dtype", None) != "fp8" or getattr(media, "mm_encoder_fp8_scale_path", None):
        return True
    log.warning(
        "kvtier: nothing is loaded or stored of requests with images and the like: scales of their encoder's attention, in fp8, follow what it "
        "saw before; give vLLM a file of scales (--mm-encoder-fp8-scale-path)"
    )
    return False


def processed(vllm_config: Any) -> dict[str, Any]:
    """As a fingerprint takes it; empty where nothing differs from the plainest engine.

    @raises Unsupported; OSError where a file system does not answer now
    """
    model = vllm_config.model_config
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return {}
    found: dict[str, Any] = {key: _text(value) for key in _SETTINGS if (value := getattr(media, key, None))}
    said = dict(getattr(media, "mm_processor_kwargs", None) or {})
    if said.get("device") in _AT_HOME:
        said.pop("device", None)
    if getattr(media, "mm_device_do_normalize", None):
        found["normalizes"] = "the model"
        for key in _OF_THE_MODEL:
            said.pop(key, None)
    if said:
        found["mm_processor_kwargs"] = _text(said)
    if rate := getattr(media, "video_pruning_rate", None):
        found["video_pruning"] = [str(float(rate)), str(getattr(media, "video_pruning_method", None) or "evs")]
    if scales := getattr(media, "mm_encoder_fp8_scale_path", None):
        found["mm_encoder_fp8_scales"] = _scales(str(scales))
    name = str(getattr(model, "model", "") or "")
    try:
        # vLLM's `download_dir` is for weights alone: beside these there is nothing of a processor.
        folder = local_folder(name, getattr(model, "revision", None)) if name else ""
    except WeightsMissing:
        folder = ""  # "weights_digest" says which model it is
    if folder and os.path.isdir(folder) and (files := _files(folder)):
        found["files"] = files
    return found
