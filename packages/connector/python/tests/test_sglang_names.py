"""Which SGLang engines share pages: where a model's configuration lies, and every argument that changes what KV is; no node."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

from kvtier import errors  # noqa: E402
from kvtier.retries import Pauses  # noqa: E402
from kvtier.sglang import arguments as arguments_module  # noqa: E402
from kvtier.sglang import identity, pools, shares, storage  # noqa: E402
from kvtier.weights import WeightsMissing  # noqa: E402
from rig import until  # noqa: E402
from sglang_play import Config, Engine, names  # noqa: E402

_WEIGHTS = b"w" * 32


class NameCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def engine(self, rank: int = 0, ranks: int = 1, **arguments: Any) -> identity.Engine:
        config = Config({}, tp_rank=rank, tp_size=ranks)
        return identity.engine_of(config, types.SimpleNamespace(**arguments), _WEIGHTS, "0.5.2")

    def name(self, rank: int = 0, ranks: int = 1, **arguments: Any) -> bytes:
        facts = {"dtype": "torch.float8_e4m3fn"}
        return identity.namespace(self.engine(rank, ranks, **arguments), "kv", 64, 1000, facts, b"")

    def model(self, name: str, **config: Any) -> str:
        made = self.folder / name
        made.mkdir(parents=True)
        (made / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 2, **config}))
        return str(made)


class Configurations(NameCase):
    def hub(self, snapshots: dict[str | None, str]) -> None:
        """A hub whose copies lie here: by revision."""

        def snapshot_download(name: str, *, revision: str | None, cache_dir: str | None, local_files_only: bool) -> str:
            assert local_files_only
            if (name, cache_dir) != ("org/model", "/cache") or revision not in snapshots:
                raise FileNotFoundError(f"{name} {revision} is not here")
            return snapshots[revision]

        hub: Any = types.ModuleType("huggingface_hub")
        hub.snapshot_download = snapshot_download
        self.enterContext(mock.patch.dict("sys.modules", {"huggingface_hub": hub}))

    def test_a_name_of_a_hub_is_the_folder_of_its_snapshot(self) -> None:
        one, other = self.model("one", rope_theta=1e4), self.model("other", rope_theta=1e6)
        self.hub({None: one, "main": one, "v2": other})
        named = {"model_path": "org/model", "download_dir": "/cache"}
        first, second = self.name(**named), self.name(**named, revision="v2")
        self.assertNotEqual(first, second)
        self.assertEqual((first, second), (self.name(model_path=one), self.name(model_path=other)))
        self.assertEqual(first, self.name(**named, revision="main"))
        engines = [self.engine(rank, 4, **named) for rank in range(4)]
        self.assertEqual([identity.writes(engine, "kv") for engine in engines], [True, False, True, False])

    def test_a_model_that_is_not_here_is_its_name_and_revision(self) -> None:
        """Its weights have a digest by the options; without one it is refused."""
        self.hub({})
        named = {"model_path": "org/model", "download_dir": "/cache"}
        found = {self.name(**named), self.name(**named, revision="v2"), self.name(**{**named, "model_path": "org/other"})}
        self.assertEqual(len(found), 3)
        with self.assertRaises(WeightsMissing):
            identity.folders(types.SimpleNamespace(**named))

    def test_as_mistral_has_it(self) -> None:
        found = []
        for theta in (1e4, 1e6):
            folder = self.folder / f"mistral-{theta}"
            folder.mkdir()
            (folder / "params.json").write_text(json.dumps({"rope_theta": theta}))
            found.append(self.name(model_path=str(folder)))
        self.assertNotEqual(*found)

    def test_one_that_cannot_be_read_now_is_not_one_that_is_missing(self) -> None:
        model = self.model("model")
        broken = mock.patch.object(Path, "read_text", side_effect=OSError(errno.ESTALE, "Stale file handle"))
        with broken, self.assertRaises(OSError):
            self.name(model_path=model)
        with mock.patch.object(os, "stat", side_effect=OSError(errno.ESTALE, "Stale file handle")), self.assertRaises(OSError):
            identity.folders(types.SimpleNamespace(model_path=model))


class Arguments(NameCase):
    def test_one_that_changes_kv_is_another_name(self) -> None:
        model = self.model("model")
        plain = self.name(model_path=model)
        seen = {plain: "none"}
        given: dict[str, Any] = {
            "torchao_config": "int4wo-128", "modelopt_quant": {"b": 1, "a": 2}, "quantize_and_serve": True, "load_format": "bitsandbytes",
            "model_loader_extra_config": '{"a": 1}', "custom_weight_loader": ["a.b"], "model_impl": "transformers",
            "speculative_draft_model_quantization": "fp8", "speculative_draft_kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16",
            "forward_hooks": [{"name": "a"}], "mm_process_config": {"image": {"max_pixels": 1}}, "rl_on_policy_target": "fsdp",
            "json_model_override_args": '{"rope_theta": 5}', "dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8",
        }
        for name, value in given.items():
            found = self.name(model_path=model, **{name: value})
            self.assertNotIn(found, seen, f"{name} has the name of {seen.get(found)}")
            seen[found] = name
        for usual in (
            {"load_format": "safetensors", "model_loader_extra_config": "{}", "torchao_config": "", "modelopt_quant": None},
            {"model_impl": "auto", "kt_method": "AMXINT4", "mm_process_config": {}, "enable_hisparse": False},
        ):
            self.assertEqual(self.name(model_path=model, **usual), plain)
        quantized = {"model_path": model, "quantization": "fp8"}  # SGLang fills in the draft's from it
        self.assertEqual(self.name(**quantized, speculative_draft_model_quantization="fp8"), self.name(**quantized))

    def test_without_them_the_name_is_what_it_was(self) -> None:
        model = self.folder / "golden"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 8}))
        name = self.name(model_path=str(model), dtype="auto", kv_cache_dtype="fp8_e4m3", context_length=4096)
        self.assertEqual(name.hex(), "fe9e5540ff3c03194cdbecc3bbeb49cba4ecad3f6b46d15353cd64e954a9b4c8")

    def test_files_count_by_their_content(self) -> None:
        model, files = self.model("model"), [self.folder / name for name in ("a.json", "b.json", "c.json")]
        for file, scale in zip(files, (1.0, 1.0, 2.0)):
            file.write_text(json.dumps({"scale": scale}))
        for name in arguments_module._FILES:
            first, same, other = (self.name(model_path=model, **{name: str(file)}) for file in files)
            self.assertEqual(first, same, name)
            self.assertEqual(len({first, other, self.name(model_path=model)}), 3, name)
        engine = self.engine(model_path=model, quantization_param_path=str(files[0]))
        self.assertEqual(engine.arguments["quantization_param_path"], hashlib.sha256(files[0].read_bytes()).hexdigest())

    def test_a_file_that_cannot_be_read_is_refused_in_one_line(self) -> None:
        model = self.model("model")
        for path in ("/nowhere/scales.json", str(self.folder)):
            with self.assertRaisesRegex(pools.Unsupported, "--quantization-param-path decides what KV is") as caught:
                self.name(model_path=model, quantization_param_path=path)
            self.assertNotIn("\n", str(caught.exception))
        stale = mock.patch.object(Path, "read_bytes", side_effect=OSError(errno.ESTALE, "Stale file handle"))
        with stale, self.assertRaises(OSError):
            self.name(model_path=model, quantization_param_path="/nowhere/scales.json")

    def test_weights_beside_the_models_own_are_in_their_digest(self) -> None:
        model = self.model("model")
        found = identity.folders(types.SimpleNamespace(model_path=model, kt_weight_path="/kt", modelopt_checkpoint_restore_path="/m.pt"))
        self.assertEqual(found, [model, "/kt", "/m.pt"])

    def test_long_factors_are_used_where_requests_are_longer_than_the_model_was_trained_on(self) -> None:
        long = {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}
        override = json.dumps({"rope_scaling": {"rope_type": "longrope"}})
        for model, more in (
            (self.model("long", **long), {}),
            (self.model("nested", text_config=long), {}),
            (self.model("by an argument", original_max_position_embeddings=4096), {"json_model_override_args": override}),
        ):
            short, at, above, longer = (self.name(model_path=model, context_length=n, **more) for n in (2048, 4096, 4097, 131072))
            self.assertEqual((short, above), (at, longer))
            self.assertNotEqual(at, above)
        llama = self.model("llama", rope_scaling={"rope_type": "llama3", "original_max_position_embeddings": 4096})
        self.assertEqual(self.name(model_path=llama, context_length=2048), self.name(model_path=llama, context_length=8192))


class Starts(unittest.TestCase):
    def test_a_file_system_that_is_away_is_asked_again_until_it_is_back(self) -> None:
        asked: list[float] = []

        def digest(*_args: Any) -> bytes:
            if len(asked) < 40:
                raise OSError(errno.ESTALE, "Stale file handle", "/models/m")
            return _WEIGHTS

        class Quick(Pauses):
            """Pauses that take no time."""

            def take(self) -> float:
                asked.append(super().take())
                return 0.0

        folders = mock.patch.object(identity, "folders", return_value=["/models/m"])
        with folders, mock.patch.object(shares, "weights_digest", digest), mock.patch.object(shares, "Pauses", Quick):
            with self.assertLogs("kvtier.sglang", "WARNING") as logs:
                made = shares.Shares(storage.options_of.parse({"kvtier": {"socket": "/s"}}), Config({}), None, "0.5.2", mock.Mock(stopped=False))
                self.addCleanup(made.close)
                until("it has a digest", lambda: made._engine)
        self.assertEqual((made.refusal, len(logs.output), made._troubles.note.call_count), ("", 1, 0))
        self.assertEqual((asked[:7], set(asked[5:]), len(asked)), ([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], {30.0}, 40))

    def test_without_the_library_there_are_misses_and_one_line(self) -> None:
        missing = errors.KvError("SETUP", "libkvtier.so is not there; install kvtier's wheel, or run: npm run build")
        for zero_copy in (True, False):
            with mock.patch.object(shares, "Copies", side_effect=missing), self.assertLogs("kvtier.sglang", "WARNING") as logs:
                engine = Engine("/tmp/kvtier-nobody.sock", zero_copy=zero_copy, weights_digest="ab" * 32)
                self.assertEqual((engine.backup(names(1, 3)), engine.prefetch(names(1, 3))), (0, (0, [])))
                self.assertEqual(engine.storage.batch_exists(names(1, 3)), 0)
                engine.storage.clear()
                engine.close()
            self.assertEqual(len(logs.output), 1, logs.output)
            self.assertIn("libkvtier.so is not there; install", engine.storage.shares.refusal)
            self.assertEqual(engine.storage.troubles.count, 0)


if __name__ == "__main__":
    unittest.main()
