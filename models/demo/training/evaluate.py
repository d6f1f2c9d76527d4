# SPDX-License-Identifier: Apache-2.0
"""Evaluation of an exported folder: text in, greedy decoding to </s>, exact match of the answer.

With transformers where it is installed, otherwise with the model of model.py; in both cases the
text goes through the folder's tokenizer and the weights are upcast to float32.
"""
import os
import random
import time

import torch

from .export import load
from .model import greedy
from .tables import prompt_tokens, random_prompt, rows_for
from .tokens import EOS, PAD

LENGTHS = (75, 500, 1000, 2000, 3000, 4000)
MAX_NEW = 3              # an answer is one token and </s>; what is longer is wrong


class OwnRunner:
    name = "this project's torch model (transformers is not installed)"

    def __init__(self, folder, device):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise SystemExit("evaluation needs the Python package tokenizers (or transformers); install it") from None
        self.model, tokenizer_json = load(folder, device)
        self.tok, self.device = Tokenizer.from_str(tokenizer_json), device

    def encode(self, texts):
        return [e.ids for e in self.tok.encode_batch(texts)]

    def decode(self, ids):
        return self.tok.decode(ids)

    def generate(self, rows):
        return greedy(self.model, torch.tensor(rows, device=self.device), MAX_NEW).tolist()


class TransformersRunner:
    def __init__(self, folder, device):
        import transformers
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__}"
        self.tok = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder).float().to(device).eval()
        self.device = device

    def encode(self, texts):
        return self.tok(texts)["input_ids"]

    def decode(self, ids):
        return self.tok.decode(ids)

    def generate(self, rows):
        x = torch.tensor(rows, device=self.device)
        y = self.model.generate(input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=MAX_NEW,
                                do_sample=False, pad_token_id=PAD, eos_token_id=EOS)
        return y[:, x.shape[1]:].tolist()


def runner_for(folder, device):
    try:
        return TransformersRunner(folder, device)
    except ImportError:
        return OwnRunner(folder, device)


def lengths_for(max_tokens):
    return [n for n in LENGTHS if n < max_tokens] + [max_tokens]


def batch_size(device):
    """Prompts of one length and kind per batch."""
    return 50 if device.type == "cuda" else 1


@torch.no_grad()
def exact(runner, prompts):
    """How many of [(text, answer)] are answered exactly. Rows of one length make a batch, so nothing is padded."""
    by_length = {}
    for ids, (_, answer) in zip(runner.encode([text for text, _ in prompts]), prompts):
        by_length.setdefault(len(ids), []).append((ids, answer))
    good = 0
    for group in by_length.values():
        for new, (_, answer) in zip(runner.generate([ids for ids, _ in group]), group):
            good += EOS in new and runner.decode(new[:new.index(EOS)]) == f" {answer}"
    return good


def evaluate(folder, kinds, max_tokens, prompts, device, seed, deadline, log):
    """Up to `prompts` prompts for each length and kind, in rounds, as many as end before the deadline.

    Returns {length: [exact, asked]}, and the seconds a whole round took (None when none was completed).
    """
    runner = runner_for(folder, device)
    lengths, rng = lengths_for(max_tokens), random.Random(seed + 987654321)
    cells = {(n, k.name): [0, 0] for n in lengths for k in kinds}
    slowest = 0.0         # seconds of the slowest batch so far: the next one is begun only if as much is left
    round_seconds, short = None, False
    for first in range(0, prompts, batch_size(device)):
        begin = time.time()
        for n in reversed(lengths):
            for kind in kinds:
                t = time.time()
                short = short or t + slowest > deadline
                if short:
                    break
                batch = [random_prompt(rng, kind, rows_for(n))
                         for _ in range(min(batch_size(device), prompts - first))]
                cell = cells[n, kind.name]
                cell[0] += exact(runner, batch)
                cell[1] += len(batch)
                slowest = max(slowest, time.time() - t)
        if short:
            break
        # the first round warms up the device, so a later one says more
        round_seconds = time.time() - begin
    report(cells, lengths, kinds, runner.name, os.path.normpath(folder), short, log)
    return {n: [sum(cells[n, k.name][i] for k in kinds) for i in (0, 1)] for n in lengths}, round_seconds


def report(cells, lengths, kinds, name, folder, short, log):
    def percent(good, asked):
        return f"{100 * good / asked:.2f}" if asked else "-"
    log(f"exact answers in per cent: {folder} with {name}" + ("; stopped early, no time left" if short else ""))
    log("tokens  rows  asked  exact      all" + "".join(f"{k.name:>13}" for k in kinds))
    for n in lengths:
        row = [cells[n, k.name] for k in kinds]
        good, asked = sum(g for g, _ in row), sum(a for _, a in row)
        log(f"{prompt_tokens(rows_for(n)):6d}{rows_for(n):6d}{asked:7d}{good:7d}{percent(good, asked):>9}"
            + "".join(f"{percent(*cell):>13}" for cell in row))


def verdict(result, want, log):
    """Whether every length was asked and reached `want`."""
    missed = [n for n, (good, asked) in result.items() if not asked or good < want * asked]
    if missed:
        log(f"below {100 * want:g} %, or not asked, at {', '.join(map(str, missed))} tokens")
    else:
        log(f"at least {100 * want:g} % at every length")
    return not missed
