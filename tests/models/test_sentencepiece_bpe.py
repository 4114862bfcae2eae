"""A SentencePiece vocabulary in a GGUF file encodes and decodes as SentencePiece itself does."""

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from models.gguf_tokenizer import tokenizer_from_gguf
from models.stream_decoder import StreamDecoder
from models.tokenizer import Tokenizer, TokenizerError

CORPUS = Path(__file__).resolve().parents[2] / "README.md"
TEXTS = [
    "",
    " ",
    "   ",
    "The cache holds pages of tokens.",
    "  two spaces before, and\n\ta tab",
    "prefixprefixprefix  cachecache",
    "Größe 12345 日本語 \N{GRINNING FACE} \N{ZERO WIDTH JOINER}",
    "<s> is text here, <tool> is a token",
    "\N{LOWER ONE EIGHTH BLOCK}already a mark",
]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix space", "no prefix space"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A processor trained on the README."""
    prefix = tmp_path_factory.mktemp("sentencepiece") / "model"
    sentencepiece.SentencePieceTrainer.train(
        input=str(CORPUS),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model"), request.param


def metadata_of(reference) -> dict[str, Any]:
    """What a converter writes into a GGUF file."""
    processor, prefix_space = reference
    ids = range(processor.vocab_size())
    kinds = ((2, processor.is_unknown), (3, processor.is_control), (5, processor.is_unused), (6, processor.is_byte))
    types = [next((kind for kind, test in kinds if test(token)), 1) for token in ids]
    types[processor.piece_to_id("<tool>")] = 4
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(token) for token in ids],
        "tokenizer.ggml.scores": [processor.get_score(token) for token in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.add_space_prefix": prefix_space,
    }


@pytest.fixture(scope="module")
def tokenizer(reference) -> Tokenizer:
    return tokenizer_from_gguf(metadata_of(reference), "trained")


@pytest.mark.parametrize("text", TEXTS)
def test_chosen_texts_are_encoded_alike(reference, tokenizer, text):
    check(reference, tokenizer, text)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_text_is_encoded_alike(reference, tokenizer, data):
    words = st.sampled_from(CORPUS.read_text().split()[:400])
    check(reference, tokenizer, data.draw(st.one_of(st.text(max_size=40), st.lists(words, max_size=8).map(" ".join))))


def check(reference, tokenizer: Tokenizer, text: str) -> None:
    processor, _ = reference
    # A user-defined token parts the text, and each part begins anew, as everywhere but in SentencePiece.
    if "<tool>" in text:
        return check_parts(reference, tokenizer, text)
    ids = tokenizer.encode(text, parse_special=False)
    assert ids == [processor.bos_id(), *processor.encode(text)]
    assert tokenizer.decode(ids) == processor.decode(ids)
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.feed([token]) for token in ids) + stream.finish() == processor.decode(ids)


def check_parts(reference, tokenizer: Tokenizer, text: str) -> None:
    processor, _ = reference
    before, after = text.split("<tool>")
    tool = processor.piece_to_id("<tool>")
    expected = [processor.bos_id(), *processor.encode(before), tool, *processor.encode(after)]
    assert tokenizer.encode(text, parse_special=False) == expected


def test_a_special_token_in_text_is_one_where_it_is_asked_for(reference, tokenizer):
    processor, _ = reference
    assert tokenizer.encode("</s>", add_special=False) == [processor.eos_id()]
    assert processor.eos_id() not in tokenizer.encode("</s>", parse_special=False, add_special=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "700 tokens, 1 scores and 700 types"),
        ({"tokenizer.ggml.scores": None}, "lacks tokenizer.ggml.scores"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "has remove_extra_whitespaces"),
    ],
)
def test_what_does_not_fit_is_refused(reference, changes, message):
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(metadata_of(reference) | changes, "trained")
