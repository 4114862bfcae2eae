"""A checkpoint that a server can serve: the golden llama, with a byte-level tokenizer and a chat template."""

import json
import shutil
from pathlib import Path

import tokenizers

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden" / "llama"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["th", "he", "in", "er", "an", "re", "the", "on", "at", "en", "nd", "and", "ing", "st", "es", "or"]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    '<tool_call>{"name": NAME, "arguments": {}}</tool_call>'
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320


def write_tiny_model(to: Path) -> Path:
    """A directory for `load_model`; the tokenizer has every token that the weights have but the last few."""
    shutil.copytree(GOLDEN, to, dirs_exist_ok=True)
    byte_tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = [*SPECIAL, *byte_tokens], []
    for word in WORDS:
        left = next(size for size in range(len(word) - 1, 0, -1) if word[:size] in tokens and word[size:] in tokens)
        merges.append((word[:left], word[left:]))
        tokens.append(word)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(to / "tokenizer.json"))
    (to / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (to / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return to
