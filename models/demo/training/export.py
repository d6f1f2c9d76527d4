# SPDX-License-Identifier: Apache-2.0
"""A model's folder in the Hugging Face form: written after training, read for further training.

model.safetensors is written and read here: the format is a header length (8 bytes, little-endian),
a JSON header and the raw tensors, and doing it by hand saves a dependency.
"""
import json
import os
import struct

import torch

from .model import Llama
from .tokens import BOS, EOS, PAD, SPECIAL

CHAT_TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "chat-template.jinja")


def write_safetensors(path, tensors):
    """tensors: {name: tensor}; all are stored as bf16."""
    header, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, t in sorted(tensors.items()):
        # numpy has no bf16, so the bytes are taken as 16-bit integers.
        blob = t.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    # The name is taken only by a whole file: a run that is killed leaves the export before it.
    with open(path + ".new", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head + b"".join(blobs))
    os.replace(path + ".new", path)


def read_safetensors(path):
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header, data = json.loads(f.read(size)), bytearray(f.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {entry['dtype']}; give a folder with BF16 weights, "
                             "as this script exports them")
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.int16, count=(end - begin) // 2, offset=begin)
        tensors[name] = flat.view(torch.bfloat16).reshape(entry["shape"])
    return tensors


def export(model, tokenizer_json, out):
    os.makedirs(out, exist_ok=True)

    def write(name, text):
        with open(os.path.join(out, name), "w", encoding="utf-8") as f:
            f.write(text)

    def dump(name, obj):
        write(name, json.dumps(obj, indent=2) + "\n")
    with open(CHAT_TEMPLATE, encoding="utf-8") as f:
        template = f.read()
    pad, bos, eos = SPECIAL
    special = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    dump("config.json", model.config)
    dump("generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
                                    "do_sample": False, "max_new_tokens": 8})
    write("tokenizer.json", tokenizer_json)
    dump("special_tokens_map.json", special)
    dump("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special, "add_bos_token": False,
                                   "clean_up_tokenization_spaces": False,
                                   "model_max_length": model.config["max_position_embeddings"],
                                   "chat_template": template})
    write_safetensors(os.path.join(out, "model.safetensors"),
                      {"model." + name: t for name, t in model.state_dict().items()})


def read_folder(folder):
    """(config, weights without their "model." prefix, tokenizer.json's text) of an exported model."""
    def read(name):
        path = os.path.join(folder, name)
        try:
            with open(path, encoding="utf-8") as f:
                return f.read()
        except OSError as e:
            raise SystemExit(f"{path}: {e.strerror}; give a folder that this script has exported") from None
    c, tokenizer_json = json.loads(read("config.json")), read("tokenizer.json")
    path = os.path.join(folder, "model.safetensors")
    if not os.path.exists(path):
        raise SystemExit(f"{path}: not there; give a folder that this script has exported")
    weights = {name.removeprefix("model."): t for name, t in read_safetensors(path).items()}
    return c, weights, tokenizer_json


def load(folder, device):
    """(model in float32, tokenizer.json's text) of an exported folder."""
    c, weights, tokenizer_json = read_folder(folder)
    model = Llama(c)
    model.load_state_dict(weights)
    return model.float().to(device).eval(), tokenizer_json
