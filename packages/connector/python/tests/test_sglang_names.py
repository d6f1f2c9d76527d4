"""Which SGLang engines share pages: where a model's configuration lies, and every argument that changes what KV is; no node."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

from kvtier import errors  # noqa: E402
from kvtier import weights  # noqa: E402
from kvtier.retries import Pauses  # noqa: E402
from kvtier.session import Session  # noqa: E402
from kvtier.sglang import arguments as arguments_module  # noqa: E402
from kvtier.sglang import identity, pools, shares, storage  # noqa: E402
from kvtier.weights import WeightsMissing  # noqa: E402
from rig import slow_sessions, until  # noqa: E402
from sglang_play import Config, Engine, Pool, names  # noqa: E402

_WEIGHTS = b"w" * 32
#: Of a plain engine, when these names were made first.
GOLDEN = "fe9e5540ff3c03194cdbecc3bbeb49cba4ecad3f6b46d15353cd64e954a9b4c8"


class NameCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def engine(self, rank: int = 0, ranks: int = 1, **arguments: Any) -> identity.Engine:
        return self.of(types.SimpleNamespace(**arguments), rank, ranks)

    def of(self, arguments: Any, rank: int = 0, ranks: int = 1) -> identity.Engine:
        return identity.engine_of(Config({}, tp_rank=rank, tp_size=ranks), arguments, _WEIGHTS, "0.5.2")

    def named(self, engine: identity.Engine) -> bytes:
        return identity.namespace(engine, "kv", 64, 1000, {"dtype": "torch.float8_e4m3fn"}, b"")

    def name(self, rank: int = 0, ranks: int = 1, **arguments: Any) -> bytes:
        return self.named(self.engine(rank, ranks, **arguments))

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
        self.assertEqual([identity.writes(engine, "kv", {}) for engine in engines], [True, False, True, False])

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


    def test_a_hub_whose_copies_cannot_be_looked_for_now_is_not_one_without_the_model(self) -> None:
        self.hub({})
        real, models = os.stat, "models--org--model"

        def away(gone: str) -> Any:
            def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
                if str(path) == gone:
                    raise OSError(errno.ESTALE, "Stale file handle", gone)
                return real(path, *args, **kwargs)

            return mock.patch.object(os, "stat", stat)

        root = str(self.folder)
        os.mkdir(f"{root}/{models}")
        for where, hubs in (({"download_dir": root}, "/nowhere"), ({}, root)):
            sys.modules["huggingface_hub"].constants = types.SimpleNamespace(HF_HUB_CACHE=hubs)  # type: ignore[attr-defined]
            arguments = types.SimpleNamespace(model_path="org/model", **where)
            for gone in (root, f"{root}/{models}"):
                for ask in (identity.folders, identity.config_of):
                    with away(gone), self.assertRaises(OSError) as caught:
                        ask(arguments)
                    self.assertEqual(caught.exception.errno, errno.ESTALE)
            self.assertEqual(identity.config_of(arguments), {"model": "org/model", "revision": ""})


class Arguments(NameCase):
    def test_one_that_changes_kv_is_another_name(self) -> None:
        model = self.model("model")
        plain = self.name(model_path=model)
        seen = {plain: "none"}
        given: dict[str, Any] = {
            "torchao_config": "int4wo-128", "modelopt_quant": {"b": 1, "a": 2}, "quantize_and_serve": True, "load_format": "bitsandbytes",
            "model_loader_extra_config": '{"a": 1}', "custom_weight_loader": ["a.b"], "model_impl": "transformers",
            "kt_amx_method": "AMXINT8", "enable_tf32_matmul": True, "speculative_draft_kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16",
            "forward_hooks": [{"name": "a"}], "mm_process_config": {"image": {"max_pixels": 1}}, "rl_on_policy_target": "fsdp",
            "json_model_override_args": '{"rope_theta": 5}', "dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8",
        }
        for name, value in given.items():
            found = self.name(model_path=model, **{name: value})
            self.assertNotIn(found, seen, f"{name} has the name of {seen.get(found)}")
            seen[found] = name
        for usual in (
            {"load_format": "safetensors", "model_loader_extra_config": "{}", "torchao_config": "", "modelopt_quant": None},
            {"model_impl": "auto", "kt_method": "AMXINT4", "kt_amx_method": "AMXINT4", "mm_process_config": {}, "enable_hisparse": False},
            {"is_embedding": True, "speculative_draft_model_quantization": "fp8"},
        ):
            self.assertEqual(self.name(model_path=model, **usual), plain)

    def test_a_drafts_quantization_is_the_models_unless_it_is_said(self) -> None:
        """SGLang fills it in; None beside a model that is quantized: "unquant" was said."""
        for of in ("fp8", None):
            given = {"model_path": self.model(f"model-{of}"), "quantization": of, "speculative_algorithm": "EAGLE"}
            found = [self.name(**given, speculative_draft_model_quantization=draft) for draft in ("fp8", "awq", None)]
            self.assertEqual(len(set(found)), 3)
            self.assertEqual(found[0 if of else 2], self.name(**given))

    def test_what_sglang_fills_in_by_itself_changes_no_name(self) -> None:
        model = self.folder / "golden"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 8}))
        defaults = {"mamba_ssm_dtype": "float32", "kt_amx_method": "AMXINT4", "load_format": "auto", "is_embedding": False}
        fields = [(name, Any, dataclasses.field(default=value)) for name, value in {"model_path": None, **defaults}.items()]
        of_0_5_4 = dataclasses.make_dataclass("ServerArgs", [*fields, *((name, Any, None) for name in ("dtype", "kv_cache_dtype", "context_length"))])
        plain = {"model_path": str(model), "dtype": "auto", "kv_cache_dtype": "fp8_e4m3", "context_length": 4096}
        self.assertEqual(self.named(self.of(of_0_5_4(**plain))).hex(), GOLDEN)
        self.assertNotEqual(self.named(self.of(of_0_5_4(**plain, mamba_ssm_dtype="bfloat16"))).hex(), GOLDEN)
        for forced in ("MiniMaxM2ForCausalLM", "Glm4MoeForCausalLM"):
            of = self.model(forced, architectures=[forced])
            self.assertEqual(self.name(model_path=of, enable_tf32_matmul=True), self.name(model_path=of))

    def test_without_them_the_name_is_what_it_was(self) -> None:
        model = self.folder / "golden"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 8}))
        name = self.name(model_path=str(model), dtype="auto", kv_cache_dtype="fp8_e4m3", context_length=4096)
        self.assertEqual(name.hex(), GOLDEN)

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
        (Path(model) / "m.safetensors").write_bytes(b"m")

        def beside(**arguments: str) -> list[str]:
            given = types.SimpleNamespace(model_path=model, **arguments)
            models = identity.folders(given)
            self.assertEqual(models, [model])
            return identity.beside(given, models)

        self.assertEqual(beside(kt_weight_path="/kt", modelopt_checkpoint_restore_path="/m.pt"), ["/kt", "/m.pt"])
        self.assertEqual(beside(kt_amx_weight_path="/kt"), ["/kt"])
        self.assertEqual(beside(kt_weight_path=model + "/", modelopt_checkpoint_restore_path=model), [])
        # Laid out as KTransformers likes: every file counts.
        other, cache, found = self.folder / "kt" / "_numa_0", self.folder / "cache", set()
        other.mkdir(parents=True)
        for data in (b"a", b"b"):
            (other / "experts.kt").write_bytes(data)
            found.add(weights.weights_digest([model], cache, beside=[str(self.folder / "kt")]))
        self.assertEqual(len(found | {weights.weights_digest([model], cache)}), 3)
        with self.assertRaises(WeightsMissing):
            weights.weights_digest([self.folder / "kt"], cache)

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

        def digest(*_args: Any, **_more: Any) -> bytes:
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

    def test_sessions_that_the_system_refuses_are_asked_for_again(self) -> None:
        refusals: list[OSError] = []

        def session(*args: Any, **kwargs: Any) -> Session:
            if refusals:
                raise refusals.pop()
            return Session(*args, **kwargs)

        class Quick(Pauses):
            def take(self) -> float:
                return 0.0 * super().take()

        self.enterContext(mock.patch.object(shares, "Session", session))
        self.enterContext(mock.patch.object(shares, "Pauses", Quick))
        engine = Engine("/tmp/kvtier-nobody.sock")
        self.addCleanup(engine.close)
        made = engine.storage.shares
        until("it has a session", lambda: made.share("kv"))
        with self.assertLogs("kvtier.sglang", "WARNING") as logs:
            for name, happens in (
                ("indexer", lambda: made.register("indexer", Pool(64, sides=1))),
                ("draft", lambda: made.add_memory("draft", *made._memory["kv"])),
                ("kv", made.renew),
            ):
                refusals += [OSError(errno.EMFILE, "Too many open files")] * 3
                happens()
                until("it has a session again", lambda name=name: made.share(name))
                self.assertEqual(refusals, [])
        self.assertEqual((len(logs.output), made.refusal, engine.storage.troubles.count), (1, "", 0))

    def test_closing_waits_once_for_all_sessions(self) -> None:
        engine = Engine("/tmp/kvtier-nobody.sock")
        made = engine.storage.shares
        until("it has a session", lambda: made.share("kv")).session.close()
        with slow_sessions(5) as (sessions, clock):
            made._shares = {str(i): types.SimpleNamespace(session=one) for i, one in enumerate(sessions)}  # type: ignore[misc]
            engine.close()
        self.assertEqual(clock, [0.2])

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
