# SPDX-License-Identifier: Apache-2.0
"""python train.py --self-test: the parts against plain, slow forms of themselves. Checks that need a
package that is not installed are skipped with a line that says so."""
import importlib.util
import os
import random
import re
import tempfile
import time

import torch

from .batches import ANSWER, END, OTHER, SECOND_WORD, Ids, make_batch
from .evaluate import MAX_NEW, TransformersRunner, exact
from .export import export, load, read_safetensors
from .loop import questions_for, step_loss, tables_for
from .model import Llama, config, greedy
from .start import carry_over, construct
from .tables import load_kinds, prompt_tokens, random_prompt
from .tokens import BOS, EOS, missing_tokens, stand_in, train_tokenizer, vocabulary

ROW = re.compile(r"\| (\d+) \| (\w+) (\w+) \| (\w+) \| (\w+) \| (\w+) \|")
QUESTION = re.compile(r"Question: What is the (\w+) of (\w+) (\w+)\?\nAnswer: (\w+)\n\n?")
SIZES = (4, 17, 120, 349)


def installed(package):
    return importlib.util.find_spec(package) is not None


def expect(truth, what):
    if not truth:
        raise SystemExit(f"self-test: {what}")


def sequence_oracle(kind, text):
    """The table and questions of a sequence, read from its text and checked one by one."""
    head, body = text.split("\n", 1)
    expect(head.removeprefix("# ") in kind.titles, f"{kind.name}: title line {head!r}")
    table, _, questions = body.partition("Question")
    rows = {}
    for number, line in enumerate(table.strip("\n").split("\n"), 1):
        m = ROW.fullmatch(line)
        expect(m and m[1] == str(number), f"{kind.name}: row {number} is {line!r}")
        expect((m[2], m[3]) not in rows, f"{kind.name}: {m[2]} {m[3]} is twice in a table")
        expect(m[2] in kind.key[0] and m[3] in kind.key[1], f"{kind.name}: foreign words in {line!r}")
        expect(all(v in known for v, known in zip(m.groups()[3:], kind.values)), f"{kind.name}: values of {line!r}")
        rows[m[2], m[3]] = dict(zip(kind.fields, m.groups()[3:]))
    asked, questions = set(), "Question" + questions
    while questions:
        m = QUESTION.match(questions)
        expect(m and rows[m[2], m[3]][m[1]] == m[4], f"{kind.name}: question or answer of {questions[:80]!r}")
        expect(m.groups()[:3] not in asked, f"{kind.name}: asked twice: {m[0]!r}")
        asked.add(m.groups()[:3])
        questions = questions[m.end():]
    return len(rows), len(asked)


def labels_oracle(texts):
    """(label, weight) of every position of a sequence, token by token; label None is </s>."""
    out, since = [], None        # since: tokens since the last "Question"
    for text in texts[1:]:
        since = 0 if text == "Question" else since + 1 if since is not None else None
        weight = {8: SECOND_WORD, 12: ANSWER, 13: END}.get(since, OTHER)
        out.append((None if since == 13 else text, weight))
    return out


def check_batches(kinds, tokenizer_json, device, log):
    """Every kind and several lengths, against the oracles and, where it is installed, the tokenizer."""
    tok = None
    if installed("tokenizers"):
        from tokenizers import Tokenizer
        tok = Tokenizer.from_str(tokenizer_json)
    else:
        log("skipped: token arrays against the tokenizer (the package tokenizers is not installed)")
    ids, gen = Ids(tokenizer_json, kinds, device), torch.Generator(device).manual_seed(0)
    id_of = vocabulary(tokenizer_json)
    text_of = {i: t for t, i in id_of.items()}
    for number, kind in enumerate(kinds):
        for n_rows in SIZES:
            for bos in (0, 1):
                where = f"{kind.name}, {n_rows} rows"
                batch = make_batch(gen, ids, 3, n_rows, 9, bos, number)
                for x, y in zip(batch.tokens.tolist(), batch.labels.tolist()):
                    expect(x[0] == BOS or not bos, f"{where}: no <s>")
                    texts = [text_of[i] for i in x[bos:]]
                    expect(tok is None or tok.encode("".join(texts)).ids == x[bos:],
                           f"{where}: the tokens are not what the tokenizer makes of their text")
                    texts.append("\n")                  # a batch ends before its last line end
                    expect(sequence_oracle(kind, "".join(texts)) == (n_rows, 9), f"{where}: rows or questions")
                    want = labels_oracle([None] * bos + texts)
                    expect([EOS if t is None else id_of[t] for t, _ in want] == y, f"{where}: labels")
                    weights = torch.tensor([w for _, w in want], device=device)
                    expect(torch.equal(weights, batch.weight), f"{where}: weights")
                    expect(torch.equal((weights == ANSWER).nonzero().flatten(), batch.answers), f"{where}: answers")
                    columns = torch.cat((batch.asked, batch.others)).sort().values
                    expect(torch.equal(columns, torch.arange(len(y), device=device)), f"{where}: columns")
    mixed = make_batch(gen, ids, 40, 4, 2, 0)
    for x in mixed.tokens.tolist():
        text = "".join(text_of[i] for i in x) + "\n"
        kind = [k for k in kinds if text.split("\n")[0][2:] in k.titles]
        expect(len(kind) == 1, f"titles of two kinds: {text[:40]!r}")
        sequence_oracle(kind[0], text)
    if tok:
        rng = random.Random(0)
        for kind in kinds:
            for n_rows in SIZES:
                prompt, answer = random_prompt(rng, kind, n_rows)
                expect(len(tok.encode(prompt).ids) == prompt_tokens(n_rows), f"{kind.name}: prompt length")
                expect(len(tok.encode(f" {answer}").ids) == 1, f"{kind.name}: {answer} is not one token")
        for text in ("naïve — 漢字 🙂\t\x00 x=1;\r\n", "| 5 | Łukasz O'Neil | 1010 |"):
            expect(tok.decode(tok.encode(text).ids) == text, f"{text!r} does not survive the tokenizer")
    log(f"batches: {len(kinds)} kinds, {', '.join(map(str, SIZES))} rows, with and without <s>: right")


def check_folder(kinds, tokenizer_json, device, log):
    """Export and load again; a start from an export; greedy decoding of both runners."""
    torch.manual_seed(0)
    model = Llama(config(-(-len(vocabulary(tokenizer_json)) // 64) * 64))
    construct(model, 4000)
    model.to(device)
    with tempfile.TemporaryDirectory() as folder:
        export(model, tokenizer_json, folder)
        again, text = load(folder, device)
        expect(text == tokenizer_json, "export: tokenizer.json differs")
        for name, value in model.state_dict().items():
            expect(torch.equal(value.bfloat16().float(), again.state_dict()[name]), f"export: {name} differs")
        path = os.path.join(folder, "model.safetensors")
        if installed("safetensors"):
            from safetensors.torch import load_file
            theirs, ours = load_file(path), read_safetensors(path)
            expect(theirs.keys() == ours.keys() and all(torch.equal(theirs[n], ours[n]) for n in ours),
                   "export: the package safetensors reads other tensors")
        else:
            log("skipped: the export read by safetensors (the package is not installed)")
        weights = {n.removeprefix("model."): t for n, t in read_safetensors(path).items()}
        other = Llama(again.config)
        construct(other, 4000)
        taken = carry_over(other, weights, tokenizer_json, tokenizer_json)
        expect(taken == len(vocabulary(tokenizer_json)), "--model: tokens lost")
        rows = slice(taken)               # the padding of the embedding is no token
        for name, value in again.state_dict().items():
            mine = other.state_dict()[name].to(device)
            expect(torch.equal(mine[rows], value[rows]) if "embed" in name else torch.equal(mine, value),
                   f"--model: {name} differs")
        if installed("transformers") and installed("tokenizers"):
            rng, theirs = random.Random(0), TransformersRunner(folder, device)
            prompts = [random_prompt(rng, kinds[0], 40) for _ in range(4)]
            x = theirs.encode([t for t, _ in prompts])
            t = torch.tensor(x, device=device)
            with torch.no_grad():
                apart = (theirs.model(t).logits - again.logits(again(t))).abs().max().item()
            expect(apart < 1e-2, f"transformers' logits are {apart} from this project's")
            exact(theirs, prompts)
        else:
            log("skipped: logits and decoding against transformers (transformers or tokenizers is not installed)")
        t = torch.randint(3, 300, (2, 30), device=device)
        some = torch.tensor([29, 3, 17], device=device)
        with torch.no_grad():
            apart = (again(t)[:, some] - again(t, some)).abs().max().item()
        expect(apart < 1e-4, f"columns computed alone are {apart} from the same of all")
        expect(greedy(again, t, MAX_NEW).shape[1] in range(1, MAX_NEW + 1), "greedy decoding")
    log("export, load, start from an export, single columns: right")


def check_training(kinds, tokenizer_json, device, log):
    torch.manual_seed(0)
    model = Llama(config(-(-len(vocabulary(tokenizer_json)) // 64) * 64))
    construct(model, 500)
    model.to(device)
    ids, losses, gen = Ids(tokenizer_json, kinds, device), [], torch.Generator(device).manual_seed(0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    for _ in range(20):
        loss, _ = step_loss(model, model, make_batch(gen, ids, 8, 6, 12, 0), gen, 0.25)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    before, after = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    expect(after < before, f"20 steps do not lower the loss: {before:.3f} to {after:.3f}")
    log(f"20 steps: loss {before:.3f} -> {after:.3f}")


def time_batches(kinds, tokenizer_json, device, log):
    ids, gen = Ids(tokenizer_json, kinds, device), torch.Generator(device).manual_seed(0)

    def wait():
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    for n_rows in (6, 40, 170, 349):
        tables, times = tables_for(n_rows, 65536), []
        for _ in range(6):
            begin = time.time()
            make_batch(gen, ids, tables, n_rows, questions_for(n_rows), 0)
            wait()
            times.append(time.time() - begin)
        log(f"a batch of 65,536 tokens, {tables} tables of {n_rows} rows: {1e3 * min(times[1:]):.1f} ms on {device}")


def run(device, log):
    kinds = load_kinds()
    if installed("tokenizers"):
        tokenizer_json = train_tokenizer(kinds, 4096)
        expect(not missing_tokens(tokenizer_json, kinds), "words that are not one token")
        log(f"tokenizer: {len(vocabulary(tokenizer_json))} tokens")
    else:
        tokenizer_json = stand_in()
        log("skipped: training a tokenizer (the package tokenizers is not installed)")
    check_batches(kinds, tokenizer_json, device, log)
    check_folder(kinds, tokenizer_json, device, log)
    check_training(kinds, tokenizer_json, device, log)
    time_batches(kinds, tokenizer_json, device, log)
    log("self-test: passed")
