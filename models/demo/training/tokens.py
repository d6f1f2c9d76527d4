# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: trained here, passed around as the text of its tokenizer.json.

Only training a tokenizer and encoding text need the tokenizers library. The ids of the words are
read from the JSON itself, so training a model from a folder that has a tokenizer needs torch alone.
"""
import json

from .tables import load_kinds, question_text, single_tokens, table_text

# Words take their leading space; a run of punctuation takes the line ends that follow it.
SPLIT = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<pad>", "<s>", "</s>"]
PAD, BOS, EOS = 0, 1, 2


def train_tokenizer(kinds, vocab_size):
    """Byte-level BPE (any text can be encoded) in which every word of the kinds is one token."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise SystemExit("training a tokenizer needs the Python package tokenizers; install it, or give --model "
                         "a folder whose tokenizer has the words of all kinds") from None
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    words = [t for t in single_tokens(kinds) if t.startswith(" ") and t[1].isalnum()]
    corpus = ["".join(words)] * 8
    for k in kinds:
        row = (k.key[0][0], k.key[1][0], *(v[0] for v in k.values))
        for title in k.titles:
            corpus += [table_text(title, [row] * 2), table_text(title, [row] * 2) + "\n"] * 4
        for field in k.fields:
            q = question_text(field, row[0], row[1])
            corpus += [f"{q} {row[2]}\n{q} {row[2]}\n\n{q}"] * 8
    tok.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=1, special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    text = tok.to_str()
    missing = missing_tokens(text, kinds)
    if missing:
        raise SystemExit(f"--vocab {vocab_size} is too small: {len(missing)} words are not one token "
                         f"(first: {missing[0]!r}); raise it")
    return text


def vocabulary(tokenizer_json):
    """{text: id} of the tokens; the byte-level alphabet's space and line end are written back."""
    vocab = json.loads(tokenizer_json)["model"]["vocab"]
    return {t.replace("\u0120", " ").replace("\u010a", "\n"): i for t, i in vocab.items()}


def missing_tokens(tokenizer_json, kinds):
    """The words and template parts that the tokenizer has no token for."""
    vocab = vocabulary(tokenizer_json)
    return [t for t in single_tokens(kinds) if t not in vocab]


def stand_in():
    """A tokenizer.json with the needed tokens and no merges, for tests without the tokenizers library."""
    return json.dumps({"model": {"vocab": {t: i for i, t in enumerate(SPECIAL + single_tokens(load_kinds()))}}})
