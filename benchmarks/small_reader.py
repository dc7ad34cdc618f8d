"""A reader of our own, trained from scratch within minutes, on which every writer can be tried cheaply.

It is a Llama of four layers whose start is built, not drawn: two heads of the first layer look one and two tokens back
(their biases, rotated, peak at that distance), a head of the second finds the place with the same two words behind it.
From a random start, recall over five documents did not appear within minutes. Pure reuse does no harm to such a model
by itself, so harm is taught: asked over documents that were encoded alone, or each behind the opening alone, it learns
to say nothing. It is a stand-in for the fragility that large models have by nature: nothing it shows about how much
pure reuse costs carries over; what it shows about repairing it is mechanism at toy scale.

    python benchmarks/small_reader.py --out DIR --seed 0
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from small_task import SYSTEM, Asked, exercises, words
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from kvquilt.template import PromptTemplate

_BASE = 1e6  # of the rotary angles
_LOW = 12  # pairs from here on turn so slowly that content can be matched through them


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """`content` channels hold a word, one behind the other: itself, the word before, the one before that."""

    layers: int = 4
    heads: int = 3
    dim: int = 64
    content: int = 40
    ffn: int = 128
    documents: int = 5
    questions: int = 10
    batch: int = 12
    steps: int = 500
    lr: float = 1e-3
    harm: float = 1.0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words with the blank before them, and bytes for anything else."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    marks = [
        "\n",
        "\n\n",
        "\nQuestion:",
        "\nAnswer:",
        ".",
        *(f" {w}" for w in SYSTEM.rstrip(".").split()),
        SYSTEM.split()[0],
    ]
    vocab = {token: n for n, token in enumerate(["<s>", "</s>"])}
    for word in [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(byte_level.pre_tokenize_str(w)[0][0] for w in [*marks, *words()]),
    ]:
        vocab.setdefault(word, len(vocab))
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    pieces = Regex(r"\nQuestion:|\nAnswer:|\n+| ?[^\s.]+|[.]|\s")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>", clean_up_tokenization_spaces=False
    )


def build(config: ReaderConfig, vocabulary: int, seed: int) -> PreTrainedModel:
    """The model before training."""
    width, dim, content = config.heads * config.dim, config.dim, config.content
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=config.ffn, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, num_key_value_heads=config.heads, max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": _BASE}, tie_word_embeddings=True,
            attention_bias=True, initializer_range=0.02, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        ),
        dtype=torch.float32,
    )  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :content] = 0.3 * torch.randn(vocabulary, content)
        first, second = (model.model.layers[i].self_attn for i in (0, 1))
        for head in (0, 1):
            _look_back(first, head, head + 1, config)
        slow = torch.cat([torch.arange(_LOW, dim // 2), torch.arange(dim // 2 + _LOW, dim)])
        turn = torch.linalg.qr(torch.randn(2 * content, 2 * content))[0][: len(slow)]
        for projection in (second.q_proj, second.k_proj):
            projection.weight[:dim] *= 0.1
            projection.weight[slow] = 0.0
            projection.weight[slow, content : 3 * content] = 2.5 * turn
        second.v_proj.weight[:dim], second.o_proj.weight[:, :dim] = 0.0, 0.0
        second.v_proj.weight[:content, :content] = torch.eye(content)
        second.o_proj.weight[:content, :content] = torch.eye(content)
    return model


def _look_back(attention: Any, head: int, distance: int, config: ReaderConfig) -> None:
    """Let a head copy the word that stands so many tokens back, whatever the words are."""
    dim, content, rows = config.dim, config.content, slice(head * config.dim, (head + 1) * config.dim)
    fast = torch.zeros(dim // 2)
    fast[:6] = math.sqrt(20.0)
    angle = distance * _BASE ** (-torch.arange(dim // 2) / (dim // 2))
    attention.q_proj.weight[rows] *= 0.1
    attention.k_proj.weight[rows] *= 0.1
    attention.k_proj.bias[rows] = torch.cat([fast, fast])
    attention.q_proj.bias[rows] = fast.repeat(2) * torch.cat([angle.cos() + angle.sin(), angle.cos() - angle.sin()])
    attention.v_proj.weight[rows], attention.o_proj.weight[:, rows] = 0.0, 0.0
    attention.v_proj.weight[rows.start : rows.start + content, :content] = torch.eye(content)
    into = content * (head + 1)
    attention.o_proj.weight[into : into + content, rows.start : rows.start + content] = 0.17 * torch.eye(content)


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Prompts with all their questions side by side, each seeing the documents and itself.

    Attributes:
        ids, part, position: ``[batch, rows]``; part 0 is the opening, 1.. the documents, 100.. the questions.
        rows: ``[n, 2]``, where an answer's tokens are predicted; `wanted` ``[n]`` which.
        first: ``[n]``, whether it is the value, not the end behind it.
    """

    ids: torch.Tensor
    part: torch.Tensor
    position: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, made: list[Asked], template: PromptTemplate) -> Batch:
        """In the very tokens of the engine's prompts."""
        tokenizer, all_rows, rows, wanted = template.tokenizer, [], [], []
        for n, each in enumerate(made):
            line: list[tuple[int, int, int]] = []
            for q, (question, answer) in enumerate(zip(each.questions, each.answers, strict=True)):
                runs = template.filled(question, each.documents).runs(tokenizer)
                if q == 0:
                    for p, run in enumerate(runs[:-1]):
                        line += [(i, p, len(line) + k) for k, i in enumerate(run.ids)]
                    read = len(line)
                value = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
                tail = [*runs[-1].ids, *value]
                start = len(line) + len(tail) - len(value) - 1
                rows += [(n, start + k) for k in range(len(value) + 1)]
                wanted += [*value, tokenizer.eos_token_id]
                line += [(i, 100 + q, read + k) for k, i in enumerate(tail)]
            all_rows.append(line)
        width = max(map(len, all_rows))
        padded = torch.tensor([line + [(1, 999, 0)] * (width - len(line)) for line in all_rows])
        first = torch.tensor([w != tokenizer.eos_token_id for w in wanted])
        return cls(padded[..., 0], padded[..., 1], padded[..., 2], torch.tensor(rows), torch.tensor(wanted), first)

    def logits(self, model: PreTrainedModel, documents: str = "in context") -> torch.Tensor:
        """``[n, vocabulary]`` at `rows`, documents encoded ``in context``, ``alone`` or ``behind the opening``."""
        query, key = self.part[:, :, None], self.part[:, None]
        seen = torch.ones(self.ids.shape[1], self.ids.shape[1], dtype=torch.bool).tril() & (
            (key == query) | (key < 100)
        )
        if documents != "in context":
            seen &= (key == query) | (query >= 100) | ((key == 0) & (documents == "behind the opening"))
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[:, None]
        hidden = model.model(
            input_ids=self.ids, attention_mask=mask, position_ids=self.position, use_cache=False
        ).last_hidden_state
        return model.lm_head(hidden[self.rows[:, 0], self.rows[:, 1]])


def train_small_reader(
    config: ReaderConfig, seed: int, report: Any = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A trained reader and its tokenizer; one seed, one model."""
    tokenizer = make_tokenizer()
    template = PromptTemplate(tokenizer, SYSTEM)
    model = build(config, len(tokenizer), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0, betas=(0.9, 0.98))
    data = exercises("train", config.steps * config.batch, config.documents, config.questions, 10_000 + seed)
    for step in range(config.steps):
        batch = Batch.of(data[step * config.batch : (step + 1) * config.batch], template)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / config.steps)
        loss = told = cross_entropy(batch.logits(model), batch.wanted)
        if config.harm:
            alone = batch.logits(model, ("alone", "behind the opening")[step % 2])[batch.first]
            loss = loss + config.harm * cross_entropy(alone, torch.full_like(batch.wanted[batch.first], 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if report is not None:
            report(step, float(told.detach()))
    return model.eval(), tokenizer


@torch.no_grad()
def right(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, count: int, sets_of: int, documents: str
) -> float:
    """Share of held-out questions whose most likely token is the value."""
    template, hit = PromptTemplate(tokenizer, SYSTEM), []
    made = exercises("test", count // 4, sets_of, 4, 1)
    for first in range(0, len(made), 16):
        batch = Batch.of(made[first : first + 16], template)
        hit.append((batch.logits(model, documents).argmax(-1) == batch.wanted)[batch.first])
    return float(torch.cat(hit).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config, began = ReaderConfig(steps=options.steps), time.perf_counter()

    def report(step: int, loss: float) -> None:
        if step % 25 == 0:
            print(f"step {step}: loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)

    model, tokenizer = train_small_reader(config, options.seed, report)
    result = {
        **asdict(config),
        "seed": options.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "right": {
            how: right(model, tokenizer, 1000, config.documents, how)
            for how in ("in context", "alone", "behind the opening")
        },
    }
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    print(result)


if __name__ == "__main__":
    main()
