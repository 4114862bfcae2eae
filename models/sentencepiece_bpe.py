"""SentencePiece's byte-pair encoding (Kudo and Richardson, 2018) in the terms of the `tokenizers` library.

SentencePiece joins, again and again, the two neighbors that make up the piece of the highest score. The library wants
pairs in order instead: here those are all ways to cut a piece in two pieces, by the score of the whole. Spaces are
`▁`, and what no piece has goes byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces, as GGUF files and SentencePiece number them."""


def sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, prefix_space: bool
) -> tokenizers.Tokenizer:
    """A tokenizer of `pieces` [vocab], their scores and types [vocab]; its special tokens are yet to be added.

    prefix_space: text begins with a space that decoding takes away.
    """
    vocabulary = {text: token for token, text in enumerate(pieces)}
    unknown = next((text for text, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix_space else spaces)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return backend


def _merges(vocabulary: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every cut of a piece in two, the best piece first; of one piece, the cut whose parts are the better pieces."""
    joinable = {text for text, token in vocabulary.items() if types[token] in (NORMAL, USER_DEFINED)}
    cuts = [
        (-scores[vocabulary[text]], vocabulary[text], vocabulary[text[:at]], vocabulary[text[at:]])
        for text in joinable
        for at in range(1, len(text))
        if text[:at] in joinable and text[at:] in joinable
    ]
    names = list(vocabulary)
    return [(names[left], names[right]) for _, _, left, right in sorted(cuts)]
