"""What of an engine's processors of media is part of its names, and what is not; no node."""

from __future__ import annotations

import unittest

from kvtier.vllm.groups import Unsupported
from test_vllm_names import Engine, folder


class Processors(unittest.TestCase):
    def test_what_processors_do_by_default_is_no_part(self) -> None:
        """Nor what is not of media; and of models without media nothing is."""
        plain = Engine().names()
        pruning = {"video_pruning_rate": 0.0, "video_pruning_method": "evs"}
        default = {"mm_processor_kwargs": {"device": "cpu"}, "media_io_kwargs": {}, **pruning}
        for media in ({}, default, {**default, "mm_processor_kwargs": None, "video_pruning_rate": None}):
            self.assertEqual(Engine(media=media, model=folder(self)).names(), plain)
        self.assertEqual(Engine(model=folder(self, preprocessor_config={"size": 1})).names(), plain)
        one = Engine(media={}, model=folder(self, preprocessor_config={"size": 1, "crop": 2})).names()
        chat = {"crop": 2, "size": 1, "chat_template": "{{ a }}", "_name_or_path": "/b", "transformers_version": "5"}
        self.assertEqual(Engine(media={}, model=folder(self, preprocessor_config=chat)).names(), one)
        for text, why in (("{", "is no JSON"), (" " * (4 << 20) + "{}", "more than 4 MiB")):
            with self.assertRaisesRegex(Unsupported, f"preprocessor_config.json.* {why}|preprocessor_config.json has {why}"):
                Engine(media={}, model=folder(self, preprocessor_config=text)).names()


if __name__ == "__main__":
    unittest.main()
