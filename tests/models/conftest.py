"""Fixtures of the model tests."""

from pathlib import Path

import pytest
from model_files import tiny_vocabulary

from models.gguf_file import read_gguf
from models.gguf_tokenizer import tokenizer_from_gguf
from models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """256 bytes, four merges, two special tokens, one added one."""
    return tokenizer_from_gguf(tiny_vocabulary(), "tiny")


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_gguf: Path) -> dict:
    return read_gguf(smollm2_gguf).metadata


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_metadata: dict) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata, "smollm2")
