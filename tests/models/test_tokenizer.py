"""Ids and text, both directions, equal the reference; special tokens only where they are asked for."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from model_files import byte_characters, tiny_vocabulary

from models.gguf_tokenizer import tokenizer_from_gguf
from models.tokenizer import Tokenizer, TokenizerError, tokenizer_from_directory

START, END, TOOL = 1, 0, 2


def test_every_encoding_equals_the_reference_in_both_directions(golden: Path, smollm2_tokenizer: Tokenizer) -> None:
    cases = json.loads((golden / "tokenizer" / "encode.json").read_text())
    assert len(cases) == 25
    for case in cases:
        ids = case["ids"]
        assert smollm2_tokenizer.encode(case["text"]) == ids, case["name"]
        as_text = smollm2_tokenizer.encode(case["text"], parse_special=False)
        assert as_text == case.get("ids_special_as_text", ids), case["name"]
        assert smollm2_tokenizer.decode(ids, skip_special=False) == case["decoded"] == case["text"], case["name"]
        assert smollm2_tokenizer.decode(ids) == case["decoded_skip_special"], case["name"]


def test_a_prefix_that_ends_inside_a_character_decodes_like_the_reference(
    golden: Path, smollm2_tokenizer: Tokenizer
) -> None:
    for case in json.loads((golden / "tokenizer" / "decode_partial.json").read_text()):
        for length, text in enumerate(case["prefixes"], start=1):
            assert smollm2_tokenizer.decode(case["ids"][:length]) == text, case["name"]


def test_the_real_tokenizer_knows_its_own_ids(smollm2_tokenizer: Tokenizer) -> None:
    assert (smollm2_tokenizer.vocab_size, smollm2_tokenizer.bos_token_id, smollm2_tokenizer.eos_token_id) == (
        49152,
        1,
        2,
    )
    assert smollm2_tokenizer.token_text(2) == "<|im_end|>"
    assert smollm2_tokenizer.token_id("<|im_end|>") == 2
    assert smollm2_tokenizer.token_bytes(smollm2_tokenizer.encode(" the")[0]) == b" the"


def test_special_text_from_a_user_can_be_kept_ordinary(tiny_tokenizer: Tokenizer) -> None:
    text = "<|start|>an<|end|>"
    parsed, plain = tiny_tokenizer.encode(text), tiny_tokenizer.encode(text, parse_special=False)
    assert (parsed[0], parsed[-1]) == (START, END)
    assert not {START, END} & set(plain)
    assert tiny_tokenizer.decode(plain) == text
    assert tiny_tokenizer.decode(parsed) == "an"
    assert tiny_tokenizer.encode(text) == parsed  # asking for plain text left no switch on


def test_user_defined_tokens_are_text_and_always_parsed(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.encode("<tool>", parse_special=False) == [TOOL]
    assert tiny_tokenizer.decode([TOOL]) == "<tool>"


def test_each_digit_stands_alone_in_smollm_and_merges_in_gpt2() -> None:
    smollm = tokenizer_from_gguf(tiny_vocabulary(), "tiny")
    gpt2 = tokenizer_from_gguf(tiny_vocabulary() | {"tokenizer.ggml.pre": "gpt-2"}, "tiny")
    assert len(smollm.encode("12")) == 2
    assert [gpt2.token_text(token) for token in gpt2.encode("12")] == ["12"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["123", "4"]),
        ("dbrx", ["123", "4"]),
        ("smaug-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("refact", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("gpt-4o", ["123", "4"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_defines(pre: str, pieces: list[str]) -> None:
    vocabulary = tiny_vocabulary() | {"tokenizer.ggml.pre": pre}
    vocabulary["tokenizer.ggml.merges"] = ["1 2", "12 3", "3 4"]
    vocabulary["tokenizer.ggml.tokens"][-3:] = ["12", "123", "34"]
    vocabulary["tokenizer.ggml.tokens"][-60:-3] = [f"<spare{index}>" for index in range(57)]
    tokenizer = tokenizer_from_gguf(vocabulary, "tiny")
    assert [tokenizer.token_text(token) for token in tokenizer.encode("1234")] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("llama-bpe", ["nB", "'s"]), ("tekken", ["n", "B", "'s"]), ("gpt-4o", ["n", "B'", "s"]), ("olmo", ["nB", "'s"])],
)
def test_capitals_and_contractions_are_split_as_the_pre_tokenizer_defines(pre: str, pieces: list[str]) -> None:
    vocabulary = tiny_vocabulary() | {"tokenizer.ggml.pre": pre}
    vocabulary["tokenizer.ggml.merges"] = ["n B", "B '", "' s"]
    vocabulary["tokenizer.ggml.tokens"][-3:] = ["nB", "B'", "'s"]
    vocabulary["tokenizer.ggml.tokens"][-60:-3] = [f"<spare{index}>" for index in range(57)]
    tokenizer = tokenizer_from_gguf(vocabulary, "tiny")
    assert [tokenizer.token_text(token) for token in tokenizer.encode("nB's")] == pieces


def test_a_whole_word_in_a_llama3_vocabulary_needs_no_merges() -> None:
    vocabulary = tiny_vocabulary()
    vocabulary["tokenizer.ggml.tokens"][-1] = "nba"
    merged = tokenizer_from_gguf(vocabulary, "tiny")
    whole = tokenizer_from_gguf(vocabulary | {"tokenizer.ggml.pre": "llama-bpe"}, "tiny")
    assert len(merged.encode("nba")) == 3
    assert whole.encode("nba") == [319]


def test_a_leading_bos_is_added_where_the_file_asks_and_left_out_on_request() -> None:
    tokenizer = tokenizer_from_gguf(tiny_vocabulary() | {"tokenizer.ggml.add_bos_token": True}, "tiny")
    plain = tokenizer.encode("an", add_special=False)
    assert tokenizer.encode("an") == [START, *plain]
    assert START not in plain


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer.encode(text, parse_special=False)
    assert tiny_tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(tiny_tokenizer.token_bytes(token) for token in ids) == text.encode()


def test_what_cannot_be_encoded_or_decoded_is_named(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 1"):
        tiny_tokenizer.encode("a\ud800")
    for token in (-1, 320):
        with pytest.raises(TokenizerError, match=f"token id {token} is outside the vocabulary of 320"):
            tiny_tokenizer.decode([token])
        with pytest.raises(TokenizerError, match="outside the vocabulary"):
            tiny_tokenizer.token_bytes(token)


def write_tokenizer(directory: Path, config: dict) -> None:
    model = tokenizers.models.BPE({text: index for index, text in enumerate(["<s>", "</s>", *byte_characters()])}, [])
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_directory_tokenizer_is_never_cut_or_padded(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 258)
    assert tokenizer.encode("abcdef")[0] == 0
    assert tokenizer.decode(tokenizer.encode("abcdef")) == "abcdef"
    assert len(tokenizer.encode("abcdef", add_special=False)) == 6


def test_a_directory_without_a_tokenizer_has_none_and_one_of_another_kind_is_named(tmp_path: Path) -> None:
    assert tokenizer_from_directory(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"has tokenizer\.model and no tokenizer\.json"):
        tokenizer_from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        tokenizer_from_directory(tmp_path)
