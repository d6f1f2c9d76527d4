"""What of an engine's processors of media is part of its names, and what is not; whose media have no names."""

from __future__ import annotations

import logging
import sys
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from engine_case import EngineCase, prompts
from engine_parts import Shape
from kvtier.vllm.groups import Unsupported
from test_vllm_names import Engine, folder

_FP8 = {"mm_encoder_attn_dtype": "fp8"}


def used(engine: Engine) -> Engine:
    """As vLLM's own processors leave the settings that they were made with: what the model does is switched off in these very settings."""
    media = engine.config.model_config.multimodal_config
    said = media.mm_processor_kwargs or {}
    if media.mm_device_do_normalize:
        said.update(do_normalize=False, do_rescale=False)
    return engine


class Processors(unittest.TestCase):
    def test_what_processors_do_by_default_is_no_part(self) -> None:
        """Nor what is not of media; and of models without media nothing is."""
        plain = Engine().names()
        pruning = {"video_pruning_rate": 0.0, "video_pruning_method": "evs"}
        default = {"mm_processor_kwargs": {"device": "cpu"}, "media_io_kwargs": {}, **pruning}
        for media in ({}, default, {**default, "mm_processor_kwargs": None, "video_pruning_rate": None, "mm_device_do_normalize": False}):
            self.assertEqual(Engine(media=media, model=folder(self)).names(), plain)
        self.assertEqual(Engine(model=folder(self, preprocessor_config={"size": 1})).names(), plain)
        one = Engine(media={}, model=folder(self, preprocessor_config={"size": 1, "crop": 2})).names()
        chat = {"crop": 2, "size": 1, "chat_template": "{{ a }}", "_name_or_path": "/b", "transformers_version": "5"}
        self.assertEqual(Engine(media={}, model=folder(self, preprocessor_config=chat)).names(), one)
        for text, why in (("{", "is no JSON"), (" " * (4 << 20) + "{}", "more than 4 MiB")):
            with self.assertRaisesRegex(Unsupported, f"preprocessor_config.json.* {why}|preprocessor_config.json has {why}"):
                Engine(media={}, model=folder(self, preprocessor_config=text)).names()

    def test_who_normalizes_is_a_part_and_what_vllm_writes_of_it_is_none(self) -> None:
        def names(model: bool, said: dict[str, Any] | None, use: bool = True) -> list[bytes]:
            engine = Engine(media={"mm_processor_kwargs": said, "mm_device_do_normalize": model})
            return (used(engine) if use else engine).names()

        plain, pixels = names(True, None), {"max_pixels": 4096}
        for said in ({}, {"device": "cpu"}, {"do_normalize": True}, {"device": "cpu", "do_rescale": False}):
            # An engine of its language alone makes no processor, so that its settings stay as they were given.
            for use in (True, False):
                self.assertEqual(names(True, dict(said), use), plain, (said, use))
        self.assertEqual(names(True, dict(pixels)), names(True, dict(pixels), use=False))
        others = [names(False, None), names(False, {"do_normalize": False}), names(False, {"do_rescale": False}), names(True, dict(pixels)),
                  names(False, dict(pixels))]
        self.assertEqual(len({tuple(one) for one in (plain, *others)}), 6)

    def test_files_of_a_hub_are_those_that_vllm_reads(self) -> None:
        """It loads weights below `download_dir`, and processors always of the user's own copies."""
        copies = {"/weights": folder(self), None: folder(self, preprocessor_config={"size": 1})}
        hub: Any = types.ModuleType("huggingface_hub")

        def snapshot_download(name: str, *, revision: str | None, cache_dir: str | None, local_files_only: bool) -> str:
            self.assertEqual((name, revision, local_files_only), ("org/model", "v2", True))
            return copies[cache_dir]

        hub.snapshot_download = snapshot_download

        def names(download_dir: str | None) -> list[bytes]:
            engine = Engine(media={}, model="org/model")
            engine.config.model_config.revision = "v2"
            engine.config.load_config = types.SimpleNamespace(download_dir=download_dir)
            return engine.names()

        with mock.patch.dict(sys.modules, {"huggingface_hub": hub}):
            first = names("/weights")
            self.assertEqual(first, names(None))
            self.assertEqual(first, Engine(media={}, model=copies[None]).names())
            copies[None] = folder(self, preprocessor_config={"size": 2})
            self.assertNotEqual(names("/weights"), first)

    def test_scales_of_an_encoder_are_named_by_their_content(self) -> None:
        def names(path: Path) -> list[bytes]:
            return Engine(media={**_FP8, "mm_encoder_fp8_scale_path": str(path)}).names()

        one, same, other = (
            Path(folder(self, scales={"layers": {"visual.0": {"q": q, "k": 2.0, "v": 3.0}}}), "scales.json") for q in (1.0, 1.0, 1.5)
        )
        first = names(one)
        self.assertEqual(first, names(same))
        self.assertNotEqual(first, names(other))
        one.write_bytes(other.read_bytes())
        self.assertEqual(names(one), names(other))
        other.unlink()
        with self.assertRaisesRegex(Unsupported, f"{other} is not there"):
            names(other)


class Requests(EngineCase):
    def test_media_of_an_encoder_that_remembers_are_left_alone(self) -> None:
        """Each engine says so once; what has no media is loaded and stored, and so are media under scales of a file."""
        scales = str(Path(folder(self, scales={}), "scales.json"))
        for media, lines, loads in ((_FP8, 3, (0, 40)), ({**_FP8, "mm_encoder_fp8_scale_path": scales}, 0, (40, 40))):
            shape, text, found = self.own(Shape(media=media)), prompts(1)[0], []
            with mock.patch.object(logging.getLogger("kvtier.vllm"), "warning") as said:
                first = self.play(self.shared(), shape)
                self.serve(first, [text])
                self.until_held(self.shared(), first, 40)
                for features in ([object()], []):
                    engine = self.play(self.shared(), shape)
                    self.serve(engine, [text], mm_features=features)
                    found.append(engine.external_tokens)
            self.assertEqual(tuple(found), loads)
            told = sum("follow what it saw before" in call.args[0] for call in said.call_args_list)
            self.assertEqual(told, lines, "lines of three engines")



if __name__ == "__main__":
    unittest.main()
