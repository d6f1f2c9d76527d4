"""Which engines share blocks: every single difference that gives bytes another meaning gives them other names; no node."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from engine_memory import make_layers
from engine_parts import FullAttentionSpec, MLAAttentionSpec
from rig import PROGRAM_S
from kvtier import weights
from kvtier.vllm import halves, identity, layouts, options, versions
from kvtier.vllm.bases import KVConnectorRole
from kvtier.vllm.groups import Unsupported, groups_of
from kvtier.vllm.guard import Troubles
from kvtier.vllm.logs import follow_vllm
from kvtier.vllm.messages import KvtierHandshake, Rank

BLOCKS, TOKENS = 5, 4
ROOT = b"\x11" * 32


class Engine:
    """A configuration, by what sets it apart from the plainest one."""

    def __init__(self, **but: Any) -> None:
        self.but = {
            "cache_dtype": "auto", "dtype": "torch.bfloat16", "quantization": None, "backend": "FLASH_ATTN", "tp": 1, "heads": 8,
            "pp": 1, "algorithm": "sha256", "scales": False, "encoder": False, "speculative": None, "version": "0.27.1",
            "device": "cuda", "hf": {"layers": 2}, "layout": "nhd", "names": ["a.0", "a.1"], "weights": b"w" * 32,
            "generation": b"", "mla": False, "kind": "block", "media": None, "model": "", **but,
        }
        get = self.but.__getitem__
        backend = types.SimpleNamespace(get_name=lambda: get("backend"))
        layer = types.SimpleNamespace(get_attn_backend=lambda: backend)
        self.config = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(tensor_parallel_size=get("tp"), pipeline_parallel_size=get("pp"), rank=0),
            cache_config=types.SimpleNamespace(
                cache_dtype=get("cache_dtype"), prefix_caching_hash_algo=get("algorithm"), block_size=TOKENS,
                calculate_kv_scales=get("scales"),
            ),
            model_config=types.SimpleNamespace(
                dtype=get("dtype"), quantization=get("quantization"), hf_config=types.SimpleNamespace(**get("hf")),
                is_encoder_decoder=get("encoder"), get_total_num_kv_heads=lambda: get("heads"),
                multimodal_config=types.SimpleNamespace(**get("media")) if get("media") is not None else None, model=get("model"),
            ),
            speculative_config=get("speculative"),
            compilation_config=types.SimpleNamespace(static_forward_context={name: layer for name in get("names")}),
        )

    def names(self, **more: Any) -> list[bytes]:
        """Of its shares."""
        but, config = {**self.but, **more}, self.config
        identity.check_supported(config)
        kind = MLAAttentionSpec if but["mla"] else FullAttentionSpec
        heads = 1 if but["mla"] else max(1, but["heads"] // but["tp"])
        spec = kind(block_size=TOKENS, page_size_bytes=TOKENS * heads * 12, sliding_window=None)
        made = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=but["names"], kv_cache_spec=spec)])
        groups = groups_of(made, TOKENS, identity.uses_eagle(config))
        tensors = {name: one.tensor for name, one in make_layers(but["layout"], but["names"], BLOCKS, TOKENS, heads, 3).items()}
        (views,) = layouts.views_of(groups, tensors, BLOCKS)
        told: dict[Rank, KvtierHandshake] = {}
        for stage in range(but["pp"]):
            layout = identity.group_layout(config, groups[0], views, but["device"], but["version"], stage)
            for rank in range(but["tp"]):
                told[stage, rank] = KvtierHandshake((stage, rank), "", (layouts.payload_bytes(views),), (layout.fingerprint(),))
        model = identity.model_digest(config, but["weights"], but["generation"])
        return [share.namespace for share in identity.shares_of(config, groups, told, model, but.get("root", ROOT))]


def folder(case: unittest.TestCase, **files: Any) -> str:
    """Of a model, with these files of processors."""
    made = tempfile.TemporaryDirectory()
    case.addCleanup(made.cleanup)
    for name, said in files.items():
        Path(made.name, f"{name}.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return made.name


class Names(unittest.TestCase):
    def test_one_difference_is_another_name(self) -> None:
        speculative = types.SimpleNamespace(method="eagle", use_eagle=lambda: True)
        engines = {
            "the plainest": Engine(),
            "fp8": Engine(cache_dtype="fp8"),
            "fp8 e5m2": Engine(cache_dtype="fp8_e5m2"),
            "fp8 e4m3": Engine(cache_dtype="fp8_e4m3"),
            "fp8 scaled per token": Engine(cache_dtype="fp8_per_token_head"),
            "float16": Engine(dtype="torch.float16"),
            "KV of bfloat16 beside numbers of float16": Engine(dtype="torch.float16", cache_dtype="torch.bfloat16"),
            "awq": Engine(quantization="awq"),
            "gptq": Engine(quantization="gptq"),
            "another backend": Engine(backend="FLASHINFER"),
            "another hash": Engine(algorithm="xxhash"),
            "another configuration": Engine(hf={"layers": 3}),
            "another minor version": Engine(version="0.28.0"),
            "another kind of GPU": Engine(device="xpu"),
            "other layers": Engine(names=["b.0", "b.1"]),
            "other order of bytes": Engine(layout="hnd"),
            "other weights": Engine(weights=b"v" * 32),
            "another generation": Engine(generation=b"1" * 16),
            "another root": Engine(root=b"\x12" * 32),
            "speculation": Engine(speculative=speculative),
            "latent": Engine(mla=True),
            "a processor's settings": Engine(media={"mm_processor_kwargs": {"max_pixels": 4096}}),
            "others": Engine(media={"mm_processor_kwargs": {"max_pixels": 8192}}),
            "how media are read": Engine(media={"media_io_kwargs": {"video": {"num_frames": 8}}}),
            "fewer tokens of a video": Engine(media={"video_pruning_rate": 0.5, "video_pruning_method": "evs"}),
            "still fewer": Engine(media={"video_pruning_rate": 0.75, "video_pruning_method": "evs"}),
            "fewer in another way": Engine(media={"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"}),
            "an encoder's attention in fp8": Engine(media={"mm_encoder_attn_dtype": "fp8"}),
            "a processor's file": Engine(media={}, model=folder(self, preprocessor_config={"size": 1})),
            "another one": Engine(media={}, model=folder(self, preprocessor_config={"size": 2})),
            "by another name": Engine(media={}, model=folder(self, processor_config={"size": 1})),
            "of videos": Engine(media={}, model=folder(self, video_preprocessor_config={"size": 1})),
        }
        named: dict[bytes, str] = {}
        for name, engine in engines.items():
            for one in engine.names():
                self.assertNotIn(one, named, f"{name} has the names of {named.get(one)}")
                named[one] = name
        self.assertEqual(Engine().names(), Engine(version="0.27.9").names())  # within a minor version all share

    def model(self, hf: dict[str, Any], longest: Any, draft: Any = None, **more: Any) -> bytes:
        configured = types.SimpleNamespace(to_dict=lambda: hf)
        model = types.SimpleNamespace(hf_config=configured, dtype="torch.bfloat16", quantization=None, max_model_len=longest, **more)
        speculative = None
        if draft is not None:
            of_draft = types.SimpleNamespace(hf_config=types.SimpleNamespace(to_dict=lambda: draft))
            speculative = types.SimpleNamespace(method="eagle", draft_model_config=of_draft)
        return identity.model_digest(types.SimpleNamespace(model_config=model, speculative_config=speculative), b"w" * 32, b"")

    def test_what_vllm_decides_by_the_longest_request(self) -> None:
        long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
        said = {**long, "original_max_position_embeddings": 4096}
        configs: dict[str, dict[str, Any]] = {
            "as Phi-3 has it": {"model_type": "phi3", "original_max_position_embeddings": 4096, "rope_scaling": long},
            "by its first name": {"rope_scaling": {**said, "rope_type": None, "type": "su"}},
            "in itself": {"rope_parameters": said},
            "by kinds of layers": {"rope_parameters": {"full_attention": said, "sliding_attention": {"rope_type": "default"}}},
            "in a text's configuration": {"text_config": {"original_max_position_embeddings": 4096, "rope_scaling": long}},
        }
        for name, hf in configs.items():
            with self.subTest(name):
                short, at, above, longer = (self.model(hf, longest) for longest in (2048, 4096, 4097, 131072))
                self.assertEqual((short, above), (at, longer))
                self.assertNotEqual(at, above)
                self.assertNotEqual(self.model({"layers": 1}, 4096, hf), self.model({"layers": 1}, 8192, hf))
        unknown = {"rope_scaling": long}
        self.assertEqual(len({self.model(unknown, longest) for longest in (2048, 4096, 8192)}), 3)
        # Fitted to the memory, after the model was made: what it was made with is the same in all of these.
        hf = configs["as Phi-3 has it"]
        self.assertEqual(self.model(hf, 3000, original_max_model_len=-1), self.model(hf, 5000, original_max_model_len=-1))

        tempered = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
        self.assertEqual(self.model(tempered, 8192), self.model(tempered, 32768))
        self.assertNotEqual(self.model(tempered, 32768), self.model(tempered, 32769))
        by_hand = [
            self.model(tempered, longest, try_get_generation_config=lambda: {"attn_temperature_tuning": False}, override_generation_config=over)
            for longest, over in ((8192, {}), (99999, {}), (8192, {"attn_temperature_tuning": True}))
        ]
        self.assertEqual([one == by_hand[0] for one in by_hand], [True, True, False])

        dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8192}
        self.assertNotEqual(self.model({"model_type": "plamo3", **dynamic}, 2048), self.model({"model_type": "plamo3", **dynamic}, 4096))
        self.assertEqual(self.model({"model_type": "internlm2", **dynamic}, 2048), self.model({"model_type": "internlm2", **dynamic}, 4096))

    def test_of_other_models_it_is_no_part(self) -> None:
        """What was stored under these names is found."""
        llama = {
            "model_type": "llama", "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        }
        for hf, golden in (
            (llama, "c988a1cfa4f9e50516dc6ffe30fabc4672f9020993c6b1e0561bc80b0bd0ac5f"),
            ({"layers": 2}, "31ebb975e771fe35c6da898ef98feaaa728f6e054eaf59fe57d5b60e3992d6e5"),
        ):
            self.assertEqual({self.model(hf, longest).hex() for longest in (4096, 131072, None)}, {golden})

    def test_ranks(self) -> None:
        """Heads of their own, or replicated: the number of ranks is part of the name; a latent is the same in all of them."""
        whole, split = Engine().names(), Engine(tp=2).names()
        self.assertEqual((len(whole), len(set(split))), (1, 2))
        self.assertFalse(set(whole) & set(split))
        few, many = Engine(tp=8, heads=4).names(), Engine(tp=16, heads=4).names()
        self.assertEqual((len(set(few)), len(set(many))), (4, 4))
        self.assertFalse(set(few) & set(many), "ranks that hold a head in other company share its blocks")
        self.assertEqual(Engine(mla=True, tp=2).names(), Engine(mla=True).names())
        self.assertEqual(len(set(Engine(pp=2, tp=2).names())), 4)

    def test_what_is_refused(self) -> None:
        with self.assertRaisesRegex(Unsupported, "calculate_kv_scales"):
            Engine(scales=True).names()
        with self.assertRaisesRegex(Unsupported, "encoder-decoder"):
            Engine(encoder=True).names()
        with self.assertRaisesRegex(Unsupported, "3 KV heads over 2 tensor ranks"):
            Engine(heads=3, tp=2).names()
        engine = Engine(tp=8, heads=4)
        groups = groups_of(
            types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(
                layer_names=["a"], kv_cache_spec=FullAttentionSpec(block_size=TOKENS, page_size_bytes=48, sliding_window=None)
            )]), TOKENS, False,
        )
        told = {(0, rank): KvtierHandshake((0, rank), "", (48,), (bytes([rank % 2]) * 32,)) for rank in range(8)}
        with self.assertRaisesRegex(Unsupported, "in different layouts"):
            identity.shares_of(engine.config, groups, told, b"", ROOT)
        del told[0, 1]
        with self.assertRaisesRegex(Unsupported, r"rank \(0, 1\) .* has not said how its tensors lie"):
            identity.shares_of(engine.config, groups, told, b"", ROOT)

    def test_eagle(self) -> None:
        def said(use_eagle: Any) -> bool:
            return identity.uses_eagle(types.SimpleNamespace(speculative_config=types.SimpleNamespace(use_eagle=use_eagle)))

        self.assertFalse(identity.uses_eagle(types.SimpleNamespace(speculative_config=None)))
        self.assertEqual([said(lambda: True), said(lambda: False), said(True), said(None)], [True, False, True, False])
        self.assertTrue(said(lambda: 1 / 0))  # it cannot be told: the last block of a hit is not counted on
        spec = FullAttentionSpec(block_size=TOKENS, page_size_bytes=48, sliding_window=None)
        made = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)])
        self.assertEqual([groups_of(made, TOKENS, eagle)[0].drops_last for eagle in (True, False)], [True, False])


class Configuration(unittest.TestCase):
    def test_options(self) -> None:
        self.assertEqual(options.parse({"socket": "/run/n.sock"}).patience_us, 1000)
        for group, taken in ((2000, "2000"), ("2000", "2000"), ("kv", "kv"), (0, "0"), ("", "")):
            self.assertEqual(options.parse({"socket": "/s", "group": group}).group, taken)
        self.assertEqual(options.parse({"socket": "/s", "weights_cache": "/kept"}).weights_cache, "/kept")
        for extra, why in (
            ({}, '"socket" is missing'),
            ({"socket": "/s", "sokcet": 1}, r"unknown key 'sokcet' \(did you mean 'socket'\?\); known are accept_versions"),
            ({"socket": "/s", "arenaDir": "/a"}, "did you mean 'arena_dir'"),
            ({"socket": "/s", "load-deadline-ms": 5}, "did you mean 'load_deadline_ms'"),
            ({"socket": "/s", "zzz": 1}, "unknown key 'zzz'; known are"),
            ({"socket": 7}, "socket is a text, not 7"),
            ({"socket": "/s", "group": True}, "group is the name of a group or its number, not True"),
            ({"socket": "/s", "group": -1}, "not -1"),
            ({"socket": "/s", "group": 2000.5}, "not 2000.5"),
            ({"socket": "/s", "group": 2**32 - 1}, "not 4294967295"),
            ({"socket": "/s", "group": str(2**32)}, "not '4294967296'"),
            ({"socket": "/s", "group": "a b"}, "not 'a b'"),
            ({"socket": "/s", "weights_cache": "kept"}, "weights_cache is the whole path of a folder"),
            ({"socket": "/s", "patience_us": 10**6}, "from 0 to 20000, not 1000000"),
            ({"socket": "/s", "patience_us": True}, "patience_us is a whole number"),
            ({"socket": "/s", "load": "no"}, "load is true or false"),
            ({"socket": "/s" * 60}, "at most 107 bytes"),
            ({"socket": "/s", "weights_digest": "AB"}, "64 hex digits"),
            ({"socket": "/s", "accept_versions": "0.31"}, "is a list"),
        ):
            with self.assertRaisesRegex(options.BadOptions, why) as caught:
                options.parse(extra)
            self.assertNotIn("\n", str(caught.exception))
        with mock.patch.dict(os.environ, {"KVTIER_WEIGHTS_CACHE": "kept"}):
            with self.assertRaisesRegex(options.BadOptions, r"KVTIER_WEIGHTS_CACHE \(environment\) is the whole path"):
                options.parse({"socket": "/s"})

    def test_lines_are_where_vllms_are(self) -> None:
        """vLLM sets up its own logger alone: ours would say nothing below WARNING."""
        said: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())

        def ends(logger: logging.Logger) -> None:
            logger.handlers, logger.propagate = [], True
            logger.setLevel(logging.NOTSET)

        theirs, ours, root = logging.getLogger("vllm"), logging.getLogger("kvtier"), logging.getLogger()
        for logger in (theirs, ours):
            self.addCleanup(ends, logger)
        follow_vllm()
        self.assertEqual((ours.handlers, ours.level), ([], logging.NOTSET))
        theirs.addHandler(Handler())
        theirs.setLevel(logging.INFO)
        with mock.patch.object(root, "handlers", [logging.NullHandler()]):  # somebody has set up one for all
            follow_vllm()
            self.assertEqual(ours.handlers, [])
        with mock.patch.object(root, "handlers", []):
            follow_vllm()
            follow_vllm()
        logging.getLogger("kvtier.vllm").info("attached")
        logging.getLogger("kvtier.vllm").debug("a detail")
        self.assertEqual(said, ["attached"])

    def test_versions(self) -> None:
        self.assertEqual([versions.find(one) is not None for one in ("0.27.3", "v0.30.0rc1", "0.31.0", "0.26.1", "0.32", "0.33.0", "dev", None)],
                         [True, True, True, False, False, False, False, True])
        self.assertIsNotNone(versions.find("0.32.2", ("0.32",)))
        self.assertIn("0.27, 0.28, 0.29, 0.30, 0.31", versions.refusal("0.32"))

    def test_versions_that_were_never_run(self) -> None:
        """Said once, by the scheduler's half; of the version that was run nothing is said."""
        config = types.SimpleNamespace(kv_transfer_config=types.SimpleNamespace())
        made = options.parse({"socket": "/s", "accept_versions": ["0.32"]})
        for version, told in (("0.27.1", 0), ("0.28.0", 1), ("0.30.2", 1), ("0.31.0", 1), ("0.32.0", 1), (None, 0)):
            installed = mock.patch.object(halves, "vllm_version", lambda version=version: version)
            with installed, mock.patch.object(halves.log, "warning") as said:
                for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
                    with mock.patch.object(halves, "WorkerHalf"):
                        halves.halves(mock.Mock(), made, config, role, None, Troubles())
            self.assertEqual(said.call_count, told, version)
            for call in said.call_args_list:
                self.assertIn(f"vLLM {version} was never run", call.args[1])

    def test_the_page_has_every_option_and_version(self) -> None:
        page = Path(__file__).resolve().parents[4].joinpath("docs/vllm.md").read_text()
        for key in options.Options.__dataclass_fields__:
            self.assertIn(f"`{key}`", page)
        for row in versions.KNOWN:
            self.assertIn(f"| {row.minor} | {row.looked_at}", page)


class Weights(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.cache = self.folder / "cache" / "weights.json"
        self.model = self.folder / "model"
        self.model.mkdir()
        for name in "ab":
            (self.model / f"{name}.safetensors").write_bytes(name.encode() * 100_000)
        (self.model / "config.json").write_text("{}")
        self.settled(0)

    def settled(self, after_ns: int) -> None:
        self.enterContext(mock.patch.object(weights, "_SETTLED_NS", after_ns))

    def digest(self, model: Path | None = None) -> tuple[str, list[str]]:
        read: list[str] = []
        found = weights.weights_digest([model or self.model], self.cache, on_read=lambda path: read.append(path.name))
        return found.hex(), sorted(read)

    def run_main(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        source = str(Path(weights.__file__).parents[1])
        plain = {"PATH": os.environ["PATH"], "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self.folder), **env}
        done = subprocess.run([sys.executable, "-m", "kvtier.weights", *arguments], env=plain, capture_output=True, text=True, timeout=PROGRAM_S)
        return done.returncode, done.stdout, done.stderr

    def test_by_content_and_read_once(self) -> None:
        first, read = self.digest()
        self.assertEqual(read, ["a.safetensors", "b.safetensors"])
        self.assertEqual(self.digest(), (first, []))
        (self.model / "a.safetensors").write_bytes(b"c" * 100_000)
        second, read = self.digest()
        self.assertEqual(read, ["a.safetensors"])
        self.assertNotEqual(first, second)
        (self.model / "a.safetensors").write_bytes(b"a" * 100_000)
        self.assertEqual(self.digest()[0], first)

    def test_a_volume_that_is_mounted_again_is_not_read_again(self) -> None:
        """It has another device's number, and may lie elsewhere; names, inodes, sizes and times are what they were."""
        first, _ = self.digest()
        stat = Path.stat

        def elsewhere(path: Path, **how: bool) -> os.stat_result:
            found = stat(path, **how)
            return os.stat_result((*found[:2], found.st_dev + 7, *found[3:]), {
                name: getattr(found, name) for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
            })

        moved = self.model.rename(self.folder / "mounted elsewhere")
        with mock.patch.object(Path, "stat", elsewhere):
            self.assertEqual(self.digest(moved), (first, []))

    def test_another_file_of_the_same_name_is_read(self) -> None:
        """Of the same size and with the same time of its last write, as archives and `cp -p` leave it; in the same place or the same inode."""
        path = self.model / "a.safetensors"
        first, _ = self.digest()
        os.utime(path, ns=(0, 0))
        self.assertEqual(self.digest(), (first, ["a.safetensors"]))  # a time of a change that nobody can set
        for i, write in enumerate((lambda data: path.write_bytes(data), lambda data: self.replace(path, data))):
            write(b"a" * 99_999 + b"xy"[i : i + 1])
            os.utime(path, ns=(0, 0))
            second, read = self.digest()
            self.assertEqual((read, second == first), (["a.safetensors"], False))
        # Where a file system makes inodes and times up, some of its bytes tell it.
        with mock.patch.object(weights, "_state", lambda path: [1, 100_000, 2, 3]):
            self.digest()
            path.write_bytes(b"z" * 100_000)
            third, read = self.digest()
            self.assertEqual(read, ["a.safetensors"])

    def replace(self, path: Path, data: bytes) -> None:
        other = path.with_suffix(".new")
        other.write_bytes(data)
        other.rename(path)

    def test_what_was_changed_just_now_is_read_again(self) -> None:
        """Two changes in one tick of a file system's clock have one time."""
        self.settled(3600 * 10**9)
        first, _ = self.digest()
        self.assertEqual(self.digest(), (first, ["a.safetensors", "b.safetensors"]))
        self.settled(0)
        self.digest()
        self.assertEqual(self.digest(), (first, []))

    def test_a_cache_that_is_damaged_costs_time_only(self) -> None:
        first, _ = self.digest()
        key = next(iter(json.loads(self.cache.read_text())))
        for damage in ("", "[1]", json.dumps({"x": [1, 2]}), json.dumps({key: "ff"}), json.dumps({key: [0, 0, 0, 0, 0, "ff"]})):
            self.cache.write_text(damage)
            self.assertEqual(self.digest()[0], first)

    def test_where_it_is_kept(self) -> None:
        """A folder or a file, by the environment; what cannot be kept is said, in one line, and costs time only."""
        first, _ = self.digest()
        for place, file in ((self.folder / "kept", self.folder / "kept/weights.json"), (self.folder / "x.json", self.folder / "x.json")):
            with mock.patch.dict(os.environ, {"KVTIER_WEIGHTS_CACHE": str(place)}):
                self.assertEqual(weights.weights_digest([self.model]).hex(), first)
            self.assertEqual(file.stat().st_mode, 0o100644)
        for env in ({"KVTIER_WEIGHTS_CACHE": "/proc/nowhere"}, {"HOME": "~", "XDG_CACHE_HOME": ""}):
            with mock.patch.dict(os.environ, env), self.assertLogs("kvtier", "WARNING") as said:
                self.assertEqual(weights.weights_digest([self.model]).hex(), first)
            self.assertEqual(len(said.output), 1)
            self.assertIn('"weights_cache"', said.output[0])
        self.assertEqual(sorted(path.name for path in (self.folder / "kept").iterdir()), ["weights.json"])

    def test_without_threads_it_is_the_systems_refusal(self) -> None:
        none_left = mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread"))
        with none_left, self.assertRaisesRegex(OSError, "can't start new thread") as caught:
            self.digest()
        self.assertEqual(caught.exception.errno, errno.EAGAIN)

    def test_with_a_thread_less_than_wanted_all_are_read(self) -> None:
        begin, asked = threading.Thread.start, []

        def once(thread: threading.Thread) -> None:
            asked.append(thread)
            if len(asked) > 1:
                raise RuntimeError("can't start new thread")
            begin(thread)

        with mock.patch("threading.Thread.start", once):
            _, read = self.digest()
        self.assertEqual((len(asked), read), (2, ["a.safetensors", "b.safetensors"]))

    def test_a_process_ends_while_they_are_read(self) -> None:
        """With more files than threads: those that wait are not read before."""
        code = (
            "import sys, threading\n"
            "from kvtier import weights\n"
            "begun = threading.Event()\n"
            "def never_read(path, stopped):\n"
            " begun.set()\n"
            " threading.Event().wait()\n"
            "weights._hash_file = never_read\n"
            "threading.Thread(target=weights.weights_digest, args=(sys.argv[1:],), daemon=True).start()\n"
            "begun.wait()\n"
        )
        for i in range(8):
            (self.model / f"{i}.safetensors").write_bytes(b"x")
        plain = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(weights.__file__).parents[1]), "HOME": str(self.folder)}
        done = subprocess.run([sys.executable, "-c", code, str(self.model)], env=plain, capture_output=True, timeout=PROGRAM_S)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_no_weights(self) -> None:
        with self.assertRaisesRegex(weights.WeightsMissing, 'give their digest as "weights_digest"'):
            weights.weights_digest([self.folder / "cache"], self.cache)

    def test_the_command_prints_what_an_engine_makes_of_them(self) -> None:
        first, _ = self.digest()
        self.assertEqual(self.run_main(str(self.model)), (0, first + "\n", ""))
        options.parse({"socket": "/s", "weights_digest": first})
        draft = self.folder / "draft"
        draft.mkdir()
        (draft / "d.safetensors").write_bytes(b"d")
        both = weights.weights_digest([self.model, draft], self.cache).hex()
        self.assertEqual(self.run_main(str(self.model), str(draft)), (0, both + "\n", ""))

    def test_what_the_command_cannot_do(self) -> None:
        empty = self.folder / "empty"
        empty.mkdir()
        for arguments, why in (
            ((), "usage: python -m kvtier.weights FOLDER"),
            (("--help",), "usage"),
            (("/nowhere/model",), "/nowhere/model is not there"),
            ((str(empty),), "no weights"),
            ((str(self.model), str(empty)), "no weights"),
        ):
            status, out, said = self.run_main(*arguments)
            self.assertEqual((status, out, said.count("\n")), (78, "", 1), said)
            self.assertIn(why, said)


if __name__ == "__main__":
    unittest.main()
