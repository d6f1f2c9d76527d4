# SPDX-License-Identifier: Apache-2.0
"""The training loop: a schedule of table sizes, the loss, progress lines, and an end that follows the clock."""
import contextlib
import math
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from .batches import ANSWER, OTHER, make_batch
from .tables import HEAD_LEN, NUMBERS, QUESTION_LEN, ROW_LEN, prompt_tokens, rows_for

CHECK = 10              # steps between two looks at the accuracy: each waits for the device
LOG_SECONDS = 5
SAVE_SECONDS = 60       # between two held-out measurements and exports
WARM_UP = 40            # steps
QUESTIONS = 40          # a table, or one for three rows where that is more: answers are what is learned from


def levels(max_tokens):
    """The most rows per table, level after level. The last has some rows more than max_tokens takes,
    so that the longest prompts wanted are not at the very edge of what was trained."""
    top = math.ceil(1.05 * rows_for(max_tokens))
    longest = prompt_tokens(int(len(NUMBERS) / 1.05))
    if rows_for(max_tokens) < 4 or top > len(NUMBERS):
        raise SystemExit(f"--max-tokens {max_tokens}: choose from {prompt_tokens(4)} to {longest}")
    return [n for n in (6, 12, 24, 48, 80, 120, 170, 240) if n < 0.8 * top] + [top]


def precision(device, bf16):
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()


def questions_for(n_rows):
    return min(2 * n_rows, max(QUESTIONS, n_rows // 3))


def tables_for(n_rows, step_tokens):
    """How many tables make a step of about step_tokens tokens."""
    return max(1, step_tokens // (HEAD_LEN + n_rows * ROW_LEN + questions_for(n_rows) * QUESTION_LEN))


def step_loss(forward, model, batch, gen, other):
    """(loss, accuracy of the answers). Every answer and question column counts, and one in eight of the others."""
    n = len(batch.others)
    some = batch.others[torch.randperm(n, generator=gen, device=batch.others.device)[:n // 8]]
    cols = torch.cat((batch.asked, some))
    z, y, w = model.logits(forward(batch.tokens, cols)), batch.labels[:, cols], batch.weight[cols]
    w = torch.where(w == OTHER, w * 8 * other, w)
    answers = y.shape[0] * len(batch.answers)
    loss = (F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view_as(y) * w).sum() / answers
    with torch.no_grad():
        accuracy = ((z.argmax(-1) == y) & (w == ANSWER)).sum() / answers
    return loss, accuracy


@torch.no_grad()
def held_out(model, ids, n_rows, step_tokens, bf16):
    """Accuracy on tables that training does not draw: a generator and a seed of their own."""
    gen = torch.Generator(ids.device).manual_seed(10 ** 6 + n_rows)
    batch = make_batch(gen, ids, tables_for(n_rows, step_tokens), n_rows, questions_for(n_rows), 0)
    with precision(ids.device, bf16):
        z = model.logits(model(batch.tokens, batch.answers))
    return (z.argmax(-1) == batch.labels[:, batch.answers]).float().mean().item()


def compiled(model, ids, bf16, log):
    """torch.compile's form of the model, or the model itself where a trial step does not work."""
    begin, gen = time.time(), torch.Generator(ids.device).manual_seed(0)
    fast = torch.compile(model, dynamic=True)
    try:
        for n_rows in (5, 9):
            with precision(ids.device, bf16):
                loss, _ = step_loss(fast, model, make_batch(gen, ids, 3, n_rows, 4, 0), gen, 1.0)
            loss.backward()
    except Exception as e:     # whatever the compiler or its C++ and CUDA tools raise
        reason = next(iter(str(e).splitlines()), "")
        log(f"--compile: {type(e).__name__}: {reason}; training goes on without it")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    torch._dynamo.config.suppress_errors = True     # a later shape that fails runs uncompiled
    log(f"--compile: {time.time() - begin:.0f}s")
    return fast


def train(model, ids, args, deadline, save, log):
    """Trains until the deadline (time.time()) or an interrupt. save: exports the model as it stands."""
    sizes = levels(args.max_tokens)
    gen, rng = torch.Generator(ids.device).manual_seed(args.seed), random.Random(args.seed)
    mats = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    opt = torch.optim.AdamW([{"params": mats, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.98), eps=1e-8, fused=True)
    start = logged = saved = time.time()
    forward = compiled(model, ids, args.bf16, log) if args.compile else model
    level, ema, step, since, tokens = 0, 0.0, 0, 0, 0
    hits = torch.zeros((), device=ids.device)
    try:
        while (now := time.time()) < deadline:
            done = (now - start) / (deadline - start)
            lr = args.lr * min(1.0, (step + 1) / WARM_UP) * min(1.0, max(0.02, (1 - done) / 0.45))
            for g in opt.param_groups:
                g["lr"] = lr
            most = sizes[level]
            # mostly near the level's own length, sometimes shorter tables, of each order of size as often
            short = round(4 * (most / 4) ** rng.random())
            n_rows = short if rng.random() < 0.3 else rng.randint(max(4, most // 2), most)
            batch = make_batch(gen, ids, tables_for(n_rows, args.step_tokens), n_rows,
                               questions_for(n_rows), int(rng.random() < 0.5))
            with precision(ids.device, args.bf16):
                loss, accuracy = step_loss(forward, model, batch, gen, args.other)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            hits += accuracy
            step, since, tokens = step + 1, since + 1, tokens + batch.tokens.numel()
            if step % CHECK:
                continue
            ema = 0.6 * ema + 0.4 * hits.item() / CHECK
            hits.zero_()
            now = time.time()
            if now - logged >= LOG_SECONDS:
                log(f"step {step} t {now - start:.0f}s level {most} rows lr {lr:.2e} loss {loss.item():.3f} "
                    f"acc {ema:.3f} tokens {tokens / 1e6:.2f}M ({tokens / (now - start) / 1e3:.0f}k/s)")
                logged = now
            if now - saved >= SAVE_SECONDS:
                log("  held out: " + "  ".join(f"{n} rows {held_out(model, ids, n, args.step_tokens, args.bf16):.3f}"
                                               for n in sorted({4, *(max(4, sizes[-1] * i // 4) for i in (1, 2, 4))})))
                save()
                saved = time.time()
            last = level + 1 == len(sizes)
            late = not last and ema > 0.5 and done > 0.65 * (level + 1) / (len(sizes) - 1)
            if not last and since >= 3 * CHECK and (ema > (0.85 if level < 3 else 0.93) or late):
                level, since, ema = level + 1, 0, ema * 0.9
                log(f"--> tables up to {sizes[level]} rows at step {step}, {now - start:.0f}s")
    except KeyboardInterrupt:
        log("interrupted: training ends here; export and evaluation follow")
    log(f"trained {step} steps, {tokens / 1e6:.2f}M tokens, {time.time() - start:.0f}s")
