"""A byte-level BPE tokenizer built from the metadata of a GGUF file.

GGUF names its pre-tokenizer (how text is split before merging) and leaves its definition to the reader, so only names
whose definition is known are accepted. `default` is refused: converters write it when they did not recognize the
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers

from models.tokenizer import Tokenizer, TokenizerError, first_line

_GPT2_DIGITS = tokenizers.pre_tokenizers.Digits(individual_digits=True)
_GPT2 = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GGUF_PRE = {
    "smollm": "smollm",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "qwen2": "qwen2",
    "dbrx": "dbrx",
    "smaug-bpe": "dbrx",
    "refact": "smollm",
}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Byte-level BPE from the vocabulary and merges in a GGUF file's metadata.

    Raises:
        TokenizerError: another tokenizer model or pre-tokenizer than those implemented, or the metadata is incomplete.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(
            f"{origin} has the tokenizer model {model!r}, implemented in GGUF files is 'gpt2': use the model's "
            "Hugging Face directory"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _GGUF_PRE:
        raise TokenizerError(
            f"{origin} has the pre-tokenizer {pre!r}, implemented are {', '.join(_GGUF_PRE)}: "
            "use a file from a current converter, or the model's Hugging Face directory"
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise TokenizerError(f"{origin} lacks tokenizer.ggml.tokens or tokenizer.ggml.merges: get the file again")
    backend = _byte_level_bpe(tokens, merges, _GGUF_PRE[pre], origin)
    types = metadata.get("tokenizer.ggml.token_type") or []
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        texts = [text for text, kind in zip(tokens, types, strict=False) if kind == wanted]
        added = [tokenizers.AddedToken(text, special=special, normalized=False) for text in texts]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise TokenizerError(
            f"{origin} asks for an end token after every prompt, which is not implemented: use another model file"
        )
    return Tokenizer(
        backend,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        prepend_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str, origin: str) -> tokenizers.Tokenizer:
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise TokenizerError(f"{origin} has the malformed merge {wrong!r}: get the file again")
    try:
        model = tokenizers.models.BPE(
            vocab={text: token for token, text in enumerate(tokens)},
            merges=pairs,
            ignore_merges=pre == "llama3",  # its vocabulary has words that no sequence of merges reaches
        )
    except Exception as error:  # the library raises bare Exception, e.g. for a merge outside the vocabulary
        raise TokenizerError(f"{origin} has a damaged vocabulary ({first_line(error)}): get the file again") from error
    backend = tokenizers.Tokenizer(model)
    sequence = tokenizers.pre_tokenizers.Sequence
    if pre == "gpt2":
        backend.pre_tokenizer = _GPT2
    elif pre == "smollm":
        backend.pre_tokenizer = sequence([_GPT2_DIGITS, _GPT2])
    else:
        pattern = tokenizers.Regex(_CL100K.replace("DIGITS", "{1,3}" if pre in ("llama3", "dbrx") else ""))
        backend.pre_tokenizer = sequence([tokenizers.pre_tokenizers.Split(pattern, behavior="isolated"), _BYTES])
    if pre == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend
