"""A tokenizer built from the metadata of a GGUF file: byte-level BPE, or SentencePiece's.

For byte-level BPE, GGUF names the pre-tokenizer (how text is split before merging) and leaves its definition to the
reader, so only names whose definition is known are accepted. `default` is refused: converters write it when they did
not recognize the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from models.sentencepiece_bpe import CONTROL, NORMAL, USER_DEFINED, sentencepiece_bpe
from models.tokenizer import Tokenizer, TokenizerError, first_line

_GPT2_DIGITS = tokenizers.pre_tokenizers.Digits(individual_digits=True)
_GPT2 = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama3": _CL100K.replace("DIGITS", "{1,3}"),
    "dbrx": _CL100K.replace("DIGITS", "{1,3}"),
    "qwen2": _CL100K.replace("DIGITS", ""),
    "tekken": _CASED.replace("SUFFIX", "").replace("DIGITS", ""),
    "gpt-4o": _CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}"),
}
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
    "olmo": "gpt2",
    "tekken": "tekken",
    "gpt-4o": "gpt-4o",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Byte-level or SentencePiece BPE from the vocabulary in a GGUF file's metadata.

    Raises:
        TokenizerError: another tokenizer model or pre-tokenizer than those implemented, or the metadata is incomplete.
    """
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise TokenizerError(
            f"{origin} has the tokenizer model {model!r}, implemented in GGUF files are {', '.join(builders)}: use the "
            "model's Hugging Face directory"
        )
    tokens = _list(metadata, "tokens", origin)
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    backend = builders[model](metadata, tokens, types, origin)
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
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
        # SentencePiece models begin with it unless the file says otherwise.
        prepend_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama")),
    )


def _list(metadata: Mapping[str, Any], name: str, origin: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise TokenizerError(f"{origin} lacks tokenizer.ggml.{name}: get the file again")
    return values


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], origin: str
) -> tokenizers.Tokenizer:
    scores = _list(metadata, "scores", origin)
    if not len(tokens) == len(scores) == len(types):
        raise TokenizerError(
            f"{origin} has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types: get the file again"
        )
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise TokenizerError(
            f"{origin} has remove_extra_whitespaces, which is not implemented: use the model's Hugging Face directory"
        )
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return sentencepiece_bpe(tokens, scores, types, prefix_space=prefix_space)


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], origin: str
) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _GGUF_PRE:
        raise TokenizerError(
            f"{origin} has the pre-tokenizer {pre!r}, implemented are {', '.join(_GGUF_PRE)}: "
            "use a file from a current converter, or the model's Hugging Face directory"
        )
    return _byte_level_bpe(tokens, _list(metadata, "merges", origin), _GGUF_PRE[pre], origin)


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str, origin: str) -> tokenizers.Tokenizer:
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise TokenizerError(f"{origin} has the malformed merge {wrong!r}: get the file again")
    try:
        model = tokenizers.models.BPE(
            vocab={text: token for token, text in enumerate(tokens)},
            merges=pairs,
            ignore_merges=pre in ("llama3", "tekken"),  # their vocabularies have words that no merges reach
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
        pattern = tokenizers.Regex(_PATTERNS[pre])
        backend.pre_tokenizer = sequence([tokenizers.pre_tokenizers.Split(pattern, behavior="isolated"), _BYTES])
    if pre == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend
