# ruff: noqa: RUF001 - the sentences are in several scripts
"""Small tokenizers of the kinds that models use, trained on the spot, as model directories."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32"

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]

CHATML = """{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif %}"""

BOS_CHAT = """{{ bos_token }}{% for message in messages %}[{{ message.role | upper }}]
{%- for part in message.content %} {{ part.text | trim }}{% endfor %}{{ eos_token }}{% endfor %}"""

_SENTENCES = [
    "The keeper of the hill station writes down the wind, the rain and the heat of each day.",
    "It's a plain answer: we'll see 12 birds, 305 sheep and 2048 stones by nine o'clock.",
    "def main(args):\n    return [x for x in args if x > 0]\n\n\nprint(main([1, 2, 3]))",
    "Der Hügel ist grün, und die Straße führt über den Fluß.",
    "Холм зелёный, а дорога идёт через реку.",
    "山上的气象站很小。每天记录风，雨和温度。",
    "丘の上の測候所は小さい。風と雨を記す。",
    'WHAT A DAY! \tThe   fog,  the frost...and then (at noon) the sun: "lovely".',
]


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    golden = [json.loads(line) for line in (GOLDEN / "recording.jsonl").read_text().splitlines()[:40]]
    prompts = [
        line["body"]["prompt"] for line in golden if isinstance(line.get("body", {}).get("prompt"), str)
    ]
    tokenizer.train_from_iterator(_SENTENCES * 3 + prompts, trainer)
    return tokenizer


def _byte_trainer() -> trainers.BpeTrainer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )


def byte_bpe() -> Tokenizer:
    """GPT-2's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel()
    return _train(tokenizer, _byte_trainer())


def byte_bpe_with_prefix_space() -> Tokenizer:
    """RoBERTa's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = _train(tokenizer, _byte_trainer())
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_bpe(*patterns: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer = _train(tokenizer, _byte_trainer())
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def llama3_like() -> Tokenizer:
    """A regular expression, then bytes; BOS in front. Qwen's kind as well."""
    return _split_bpe(_LLAMA3)


def o200k_like() -> Tokenizer:
    """GPT-4o's and Llama 4's kind."""
    return _split_bpe(_O200K)


def deepseek_like() -> Tokenizer:
    """Several expressions after each other, the first of which leave gaps."""
    return _split_bpe(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _LLAMA3)


def unigram() -> Tokenizer:
    """SentencePiece's unigram model with words marked (T5, XLM-R, ALBERT)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer = _train(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = _train(
        tokenizer, trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def _sentencepiece_bpe() -> Tokenizer:
    """Trained on words, so that no merge goes across a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[*SPECIAL, *bytes_],
        initial_alphabet=list(string.printable),
        show_progress=False,
    )
    tokenizer = _train(tokenizer, trainer)
    contents = json.loads(tokenizer.to_str())
    contents["added_tokens"] = [token for token in contents["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(contents))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def gemma_like() -> Tokenizer:
    """Byte-fallback BPE over whole texts, spaces marked."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return tokenizer


def llama2_like() -> Tokenizer:
    """The same with a mark put in front of every stretch of text."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def uncuttable() -> Tokenizer:
    """Merges that go across spaces: only special tokens part its texts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False))


def greedy_added_tokens() -> Tokenizer:
    """Added tokens that swallow spaces, hold them, or are found in lower-cased text."""
    tokenizer = byte_bpe()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("[go]", rstrip=True), AddedToken("[stop]", lstrip=True)])
    tokenizer.add_tokens(
        [AddedToken("the wind", normalized=True), AddedToken("ox", rstrip=True, normalized=True)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind
    for kind in (
        byte_bpe,
        byte_bpe_with_prefix_space,
        llama3_like,
        o200k_like,
        deepseek_like,
        unigram,
        wordpiece,
        gemma_like,
        llama2_like,
        uncuttable,
        greedy_added_tokens,
    )
}


def save(tokenizer: Tokenizer, directory: Path, template: str | None = CHATML, **config: Any) -> Path:
    """Write a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
