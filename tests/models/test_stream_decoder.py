"""Streamed pieces join to the decoded whole, and no piece holds a character that is not complete."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from models import StreamDecoder, Tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    return [*(decoder.feed([token]) for token in ids), decoder.finish()]


def test_reference_texts_come_out_whole(golden: Path, smollm2_tokenizer: Tokenizer) -> None:
    for case in json.loads((golden / "tokenizer" / "encode.json").read_text()):
        assert "".join(pieces_of(smollm2_tokenizer, case["ids"], skip_special=False)) == case["decoded"], case["name"]
        assert "".join(pieces_of(smollm2_tokenizer, case["ids"])) == case["decoded_skip_special"], case["name"]


def test_no_piece_of_valid_text_has_a_broken_character(golden: Path, smollm2_tokenizer: Tokenizer) -> None:
    for case in json.loads((golden / "tokenizer" / "encode.json").read_text()):
        assert "\ufffd" not in "".join(pieces_of(smollm2_tokenizer, case["ids"])), case["name"]


def test_a_character_appears_with_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("a\N{GRINNING FACE}b", parse_special=False)
    assert pieces_of(tiny_tokenizer, ids) == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]


def test_an_incomplete_end_comes_out_on_finish(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("a\N{GRINNING FACE}", parse_special=False)[:-1]
    assert pieces_of(tiny_tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_a_finished_decoder_can_be_used_again(tiny_tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tiny_tokenizer)
    assert decoder.feed(tiny_tokenizer.encode("an")) == "an"
    assert decoder.finish() == ""
    assert decoder.feed(tiny_tokenizer.encode(" an")) == " an"


@given(st.lists(st.integers(0, 319), max_size=40), st.booleans())
def test_any_token_ids_join_to_their_decoding(tiny_tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> None:
    assert "".join(pieces_of(tiny_tokenizer, ids, skip_special)) == tiny_tokenizer.decode(
        ids, skip_special=skip_special
    )


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.data())
def test_feeding_in_runs_changes_nothing_and_nothing_is_taken_back(
    tiny_tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tiny_tokenizer.encode(text, parse_special=False)
    decoder, emitted = StreamDecoder(tiny_tokenizer, skip_special=False), ""
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        emitted += decoder.feed(ids[:count])
        ids = ids[count:]
        assert text.startswith(emitted)
    assert emitted + decoder.finish() == text


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary: words with a leading mark, single bytes for everything else."""
    words = ["<s>", "\u2581", "\u2581an", "an", "a", "b"]
    vocabulary = {text: index for index, text in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<s>"))
    decoders = tokenizers.decoders
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


@given(st.lists(st.integers(1, 261), max_size=30))
def test_byte_fallback_vocabularies_stream_too(byte_fallback: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(byte_fallback, ids)) == byte_fallback.decode(ids)


def test_a_byte_of_a_byte_fallback_vocabulary_waits_for_the_run_to_end(byte_fallback: Tokenizer) -> None:
    euro = [byte_fallback.token_id(f"<0x{byte:02X}>") for byte in "\N{EURO SIGN}".encode()]
    assert pieces_of(byte_fallback, [2, *euro, 3]) == ["an", "", "", "", "\N{EURO SIGN}an", ""]
    assert byte_fallback.token_bytes(euro[0]) == b"\xe2"
    assert byte_fallback.token_bytes(2) == b" an"
