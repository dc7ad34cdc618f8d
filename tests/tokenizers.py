"""Small real tokenizers, trained in a moment on a few sentences; each is made once per session.

They cover what models in use do: byte-level BPE without and with a beginning-of-text token, and three that write
spaces as ``▁`` and open texts with one (BPE with byte fallback in its two forms, Unigram).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers as tk
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "You are a helpful assistant. Today Date: 26 Jul 2024. Cutting Knowledge Date: December 2023",
    "system user assistant model think INST What does the with statement do? It opens and closes things.",
    "A context manager is an object that defines the runtime context to be established.\n\nSee also:  PEP 343.\n",
    "今日は良い天気です。日本語の文章。 Ünïcödé naïve café 🙂🚀 \t tabs and\r\nnew lines",
] * 4
CONTROL = [
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
PLAIN_ADDED = ["<think>", "</think>", "<h1>"]  # added tokens that are not special, as in Qwen3 and Gemma


CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


@cache
def chatml_tokenizer() -> Any:
    """The one for tests that need just any tokenizer: byte-level, ChatML, no beginning-of-text token."""
    tokenizer = byte_level(template=CHATML)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@cache
def byte_level(bos: str | None = None, template: str | None = None) -> Any:
    """GPT-2-like: lossless, no space of its own; with `bos` its post-processor puts that token first, as Llama 3's."""
    backend = tk.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return _finish(backend, bos, template)


@cache
def bytes_only(bos: str | None = None, template: str | None = None) -> Any:
    """One token per byte, the byte itself as its id; control tokens follow from 256 in the order of `CONTROL`."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    vocab = {chr(byte): byte for byte in shown}
    vocab |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    backend = tk.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, bos, template)


@cache
def metaspace(scheme: str = "always", template: str | None = None) -> Any:
    """Llama-2-like BPE with byte fallback: every text (`always`), or the first (`first`), is opened with a space.

    ``normalizer`` is the older form of `always`, in which a normalizer writes the space.
    """
    backend = tk.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    alphabet = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *alphabet], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend = _without_added(backend)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    if scheme == "normalizer":
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return _finish(backend, "<s>", template)


@cache
def unigram(template: str | None = None) -> Any:
    """T5-like Unigram with byte fallback, whose vocabulary holds ``<s>`` as a piece that plain text can spell."""
    backend = tk.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    alphabet = [f"<0x{n:02X}>" for n in range(256)]
    special = ["<unk>", "<s>", "</s>", *alphabet]
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["model"]["byte_fallback"] = True
    backend = _without_added(tk.Tokenizer.from_str(json.dumps(state)))
    pieces = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    backend.decoder = decoders.Sequence(pieces)
    return _finish(backend, "<s>", template)


@cache
def word_piece() -> Any:
    """BERT-like: lower-cases, and its decoder writes spaces between words."""
    words = ["[UNK]", "x", "a", "the", "##a", "##x"]
    backend = tk.Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def _without_added(backend: tk.Tokenizer) -> tk.Tokenizer:
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return tk.Tokenizer.from_str(json.dumps(state))


def _finish(backend: tk.Tokenizer, bos: str | None, template: str | None) -> Any:
    backend.add_special_tokens(CONTROL)
    backend.add_tokens([tk.AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    names = {"bos_token": bos or "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = template
    return tokenizer
