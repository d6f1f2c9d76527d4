# SPDX-License-Identifier: Apache-2.0
"""The tables: their kinds, the words they are made of, and their texts.

All words come from ../words.json, which the demo (packages/cli/src/demo-table.ts) reads too. Every
kind of table has rows and questions of the same shape (two words, then three values, each one
token), because the constructed start of the model (start.py) looks back fixed numbers of tokens.
"""
import json
import os
from typing import NamedTuple

WORDS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "words.json")

# Row numbers and number values. Each must be one token; the tokenizer never joins more than 3 digits.
NUMBERS = [str(i) for i in range(1, 500)]

# Tokens of the title lines, of a row, of a question up to "Answer:", and of that with its answer
# and a line end.
HEAD_LEN, ROW_LEN, PROMPT_LEN, QUESTION_LEN = 3, 12, 12, 14


class Kind(NamedTuple):
    name: str
    titles: list
    key: list       # the lists of a row's two words
    fields: list    # the names of the three values, as questions use them
    values: list    # the lists of the three values


def load_kinds(names=None, path=WORDS_FILE):
    """The kinds called names (all without it), in the file's order."""
    with open(path, encoding="utf-8") as f:
        words = json.load(f)
    known = words["kinds"]
    for name in names or []:
        if name not in known:
            raise SystemExit(f"--kinds: no kind {name!r} in {os.path.normpath(path)}; choose from {', '.join(known)}")

    def word_list(ref):
        if isinstance(ref, list):
            low, high = ref
            return [str(i) for i in range(low, high + 1)]
        return words[ref] if ref in words else words["lists"][ref]
    return [Kind(name, k["titles"], [word_list(r) for r in k["key"]], list(k["fields"]),
                 [word_list(r) for r in k["fields"].values()])
            for name, k in known.items() if not names or name in names]


def rows_for(tokens):
    """The most rows with which a table and one question fit into so many prompt tokens."""
    return (tokens - HEAD_LEN - PROMPT_LEN) // ROW_LEN


def prompt_tokens(n_rows):
    return HEAD_LEN + n_rows * ROW_LEN + PROMPT_LEN


def table_text(title, rows):
    """rows: (word, word, value, value, value); the canonical text of a table."""
    body = "".join(f"| {i} | {a} {b} | {x} | {y} | {z} |\n" for i, (a, b, x, y, z) in enumerate(rows, 1))
    return f"# {title}\n{body}"


def question_text(field, first, second):
    """The text after which the model gives the answer (with its leading space) and then </s>."""
    return f"Question: What is the {field} of {first} {second}?\nAnswer:"


def random_rows(rng, kind, n_rows):
    """rng: random.Random. Rows whose two words together occur only once in the table."""
    first, second = kind.key
    pairs = rng.sample(range(len(first) * len(second)), n_rows)
    return [(first[p // len(second)], second[p % len(second)], *(rng.choice(v) for v in kind.values)) for p in pairs]


def random_prompt(rng, kind, n_rows):
    """(prompt, answer): a fresh table with one question."""
    rows = random_rows(rng, kind, n_rows)
    row, field = rng.choice(rows), rng.randrange(len(kind.fields))
    text = table_text(rng.choice(kind.titles), rows) + question_text(kind.fields[field], row[0], row[1])
    return text, row[2 + field]


def single_tokens(kinds):
    """Every text that must be one token, in a fixed order: the template's parts, then the words."""
    template = ["#", "\n", "\n\n", "|", " |", " |\n", " |\n\n",
                "Question", ":", " What", " is", " the", " of", "?\n", "Answer"]
    words = list(NUMBERS)
    for k in kinds:
        for group in (k.titles, *k.key, k.fields, *k.values):
            words += group
    return list(dict.fromkeys(template + [" " + w for w in words]))
