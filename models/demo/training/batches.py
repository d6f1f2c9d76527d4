# SPDX-License-Identifier: Apache-2.0
"""Training batches as token arrays, made on the device that trains, with no loop over tables.

The layout of a batch (where rows, questions and answers stand) is the same for all its tables,
so positions are lists of columns and nothing has to be read back from the device.
"""
from typing import NamedTuple

import torch

from .tables import HEAD_LEN, NUMBERS, QUESTION_LEN, ROW_LEN
from .tokens import BOS, EOS, vocabulary

ANSWER_AT = QUESTION_LEN - 2        # the answer in a question
SECOND_WORD_AT = 8                  # the second of the two words in a question

# Weights in the loss. After each answer the label is </s>, although the sequence goes on with the
# next question: a served answer ends there.
OTHER, SECOND_WORD, ANSWER, END = 0.02, 0.1, 1.0, 0.05


class Batch(NamedTuple):
    tokens: torch.Tensor     # [tables, length]
    labels: torch.Tensor     # [tables, length]: the next token, or </s> after an answer
    weight: torch.Tensor     # [length]: the label's weight in the loss
    asked: torch.Tensor      # columns of the questions' labels that are learned in every step
    answers: torch.Tensor    # columns whose label is an answer
    others: torch.Tensor     # all columns that are not in asked


class Ids:
    """Token ids of the words and of the template, on a device."""

    def __init__(self, tokenizer_json, kinds, device):
        vocab = vocabulary(tokenizer_json)
        self.device, self.kinds = torch.device(device), kinds

        def ids(texts):
            return [vocab[t] for t in texts]

        def tensor(values):
            return torch.tensor(values, device=self.device)
        # The word lists of all kinds one after the other; a kind's list is a start and a size.
        flat, start, size = [], [], []
        for k in kinds:
            lists = [ids(" " + w for w in group) for group in (*k.key, *k.values, k.titles)]
            start.append([len(flat) + sum(map(len, lists[:i])) for i in range(len(lists))])
            size.append([len(x) for x in lists])
            flat += [i for x in lists for i in x]
        self.flat, self.start, self.size = tensor(flat), tensor(start), tensor(size)
        self.fields = tensor([ids(" " + f for f in k.fields) for k in kinds])
        self.numbers = tensor(ids(" " + n for n in NUMBERS))
        self.hash, self.nl, self.nl2, self.end, self.end2 = ids(("#", "\n", "\n\n", " |\n", " |\n\n"))
        self.row = tensor(ids(("|", "|", " |", " |", " |", " |", " |", " |", " |", " |", " |", " |\n")))
        self.question = tensor(ids(("Question", ":", " What", " is", " the", " of", " of", " of", " of",
                                    "?\n", "Answer", ":", "\n", "\n")))


def make_batch(gen, ids, tables, n_rows, n_q, bos, kind=None):
    """Tables of n_rows rows, each with n_q questions and answers after it.

    gen: a torch.Generator on ids.device. bos: whether the sequences begin with <s>. kind: the index
    of the one kind of all tables; without it every table's kind is drawn.
    """
    dev, n_q = ids.device, min(n_q, 3 * n_rows)

    def rand(*shape):
        return torch.rand(shape, generator=gen, device=dev)

    def distinct(limit, n):
        """n different numbers below limit (a scalar, or one limit per table), in random order.

        Sorted draws with repeats become different when the i-th is raised by i. This is not quite
        uniform over the sets, but needs no second draw and no reading back.
        """
        draws = (rand(tables, n) * (limit - n + 1)).long().sort(dim=1).values + torch.arange(n, device=dev)
        return draws.gather(1, rand(tables, n).argsort(dim=1))
    if kind is None:
        kinds = torch.randint(len(ids.kinds), (tables,), generator=gen, device=dev)
    else:
        kinds = torch.full((tables,), kind, device=dev)
    start, size = ids.start[kinds], ids.size[kinds]                      # [tables, lists]
    pair = distinct((size[:, 0] * size[:, 1])[:, None], n_rows)
    second = size[:, 1:2]
    word1, word2 = ids.flat[start[:, 0:1] + pair // second], ids.flat[start[:, 1:2] + pair % second]
    drawn = (rand(tables, n_rows, 3) * size[:, None, 2:5]).long()
    values = ids.flat[start[:, None, 2:5] + drawn]                       # [tables, n_rows, 3]

    head = HEAD_LEN + bos
    q0 = head + n_rows * ROW_LEN
    length = q0 + n_q * QUESTION_LEN
    x = torch.empty((tables, length), dtype=torch.long, device=dev)
    x[:, :bos] = BOS
    x[:, bos] = ids.hash
    x[:, bos + 1] = ids.flat[start[:, 5] + (rand(tables) * size[:, 5]).long()]
    x[:, bos + 2] = ids.nl
    t = x[:, head:q0].view(tables, n_rows, ROW_LEN)
    t[:] = ids.row
    t[:, :, 1] = ids.numbers[:n_rows]
    t[:, :, 3], t[:, :, 4] = word1, word2
    t[:, :, 6:12:2] = values
    t[:, -1, 11] = torch.where(rand(tables) < 0.25, ids.end2, ids.end)

    ask = distinct(3 * n_rows, n_q)
    row, field = ask // 3, ask % 3
    q = x[:, q0:].view(tables, n_q, QUESTION_LEN)
    q[:] = ids.question
    q[:, :, 5] = ids.fields[kinds[:, None], field]
    q[:, :, 7], q[:, :, SECOND_WORD_AT] = word1.gather(1, row), word2.gather(1, row)
    q[:, :, ANSWER_AT] = values.reshape(tables, -1).gather(1, ask)
    q[:, :, ANSWER_AT + 1] = torch.where(rand(tables, 1) < 0.25, ids.nl2, ids.nl)

    labels = x.clone()
    labels[:, q0:].view(tables, n_q, QUESTION_LEN)[:, :, ANSWER_AT + 1] = EOS
    return Batch(x[:, :-1], labels[:, 1:], *columns(q0, n_q, dev))


def columns(q0, n_q, device):
    """Batch's weight, asked, answers and others; a label stands one column before its token."""
    begin = q0 - 1 + QUESTION_LEN * torch.arange(n_q)[:, None]
    weight = torch.full((q0 - 1 + n_q * QUESTION_LEN,), OTHER)
    weight[begin + SECOND_WORD_AT], weight[begin + ANSWER_AT], weight[begin + ANSWER_AT + 1] = SECOND_WORD, ANSWER, END
    answers = (begin + ANSWER_AT).flatten()
    asked, others = (weight != OTHER).nonzero().flatten(), (weight == OTHER).nonzero().flatten()
    return [t.to(device, non_blocking=True) for t in (weight, asked, answers, others)]
