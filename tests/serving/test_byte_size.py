"""Byte sizes are read as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_serving.byte_size import ByteSizeError, format_byte_size, parse_byte_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1024", 1024),
        ("7B", 7),
        ("512MiB", 512 << 20),
        ("1gib", 1 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3kb", 3000),
        ("1TiB", 1 << 40),
        ("0.1KB", 100),
    ],
)
def test_a_size_is_read_in_any_usual_unit(text: str, size_bytes: int) -> None:
    assert parse_byte_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1GiB", "1e9", "1,5GiB", "1GiB2", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ByteSizeError, match=r"is not a byte size: .* as in 512MiB"):
        parse_byte_size(text)


@pytest.mark.parametrize("text", ["0", "0MiB", "0.1"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(ByteSizeError, match="less than one byte"):
        parse_byte_size(text)


@given(st.integers(1, 2**60))
def test_a_plain_number_is_exact(size_bytes: int) -> None:
    assert parse_byte_size(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(5, "5 bytes"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (10 << 30, "10.0 GiB")]
)
def test_a_size_is_shown_in_the_unit_that_it_fills(size_bytes: int, text: str) -> None:
    assert format_byte_size(size_bytes) == text
