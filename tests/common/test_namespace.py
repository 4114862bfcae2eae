"""CacheNamespace: every field reaches the digest, and no two values serialize alike."""

import dataclasses

import pytest

from kv_common import CacheNamespace, NamespaceError

BASE = CacheNamespace(
    weights_fingerprint=b"w" * 32,
    revision="main",
    model_config=(("norm_eps", 1e-5),),
    rope=(("theta", 10000.0), ("scaling", None)),
    compute_dtype="float32",
    tokenizer_fingerprint=b"t" * 32,
    kv_dtype="float32",
    kv_quantization="",
    layout=(("num_layers", 30), ("tokens_per_page", 16)),
    kv_head_shards=1,
)
FIELD_NAMES = [field.name for field in dataclasses.fields(CacheNamespace)]


def something_else(value: object) -> object:
    """A value of the same type that differs as little as possible."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return (*value[:-1], (value[-1][0], something_else(value[-1][1])))
    if isinstance(value, float):
        return value * (1 + 2**-50)
    raise TypeError(f"teach this test to change a {type(value).__name__}")


def with_rope(*pairs: tuple[str, object]) -> bytes:
    return dataclasses.replace(BASE, rope=pairs).digest()


def test_equal_namespaces_have_equal_digests_of_32_bytes() -> None:
    assert BASE.digest() == dataclasses.replace(BASE).digest()
    assert len(BASE.digest()) == 32


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_changing_any_one_field_alone_changes_the_digest(name: str) -> None:
    other = dataclasses.replace(BASE, **{name: something_else(getattr(BASE, name))})
    assert other.digest() != BASE.digest()


def test_no_two_single_changes_collide() -> None:
    digests = {
        dataclasses.replace(BASE, **{name: something_else(getattr(BASE, name))}).digest() for name in FIELD_NAMES
    }
    assert len(digests) == len(FIELD_NAMES)


def test_swapping_the_values_of_two_fields_changes_the_digest() -> None:
    one = dataclasses.replace(BASE, kv_dtype="int8", compute_dtype="float16")
    other = dataclasses.replace(BASE, kv_dtype="float16", compute_dtype="int8")
    assert one.digest() != other.digest()


def test_moving_a_letter_across_a_boundary_changes_the_digest() -> None:
    assert with_rope(("ab", "c")) != with_rope(("a", "bc"))
    one = dataclasses.replace(BASE, compute_dtype="ab", kv_dtype="c")
    other = dataclasses.replace(BASE, compute_dtype="a", kv_dtype="bc")
    assert one.digest() != other.digest()


@pytest.mark.parametrize("tag", "0bifsytn")
def test_a_value_cannot_imitate_the_boundary_between_two(tag: str) -> None:
    assert with_rope((f"a{tag}b", "c")) != with_rope(("a", f"b{tag}c"))


def test_the_names_of_the_fields_are_part_of_the_digest() -> None:
    # The same values under another name, as after renaming a field: an old cache on disk must not be hit.
    names = ["provenance" if name == "revision" else name for name in FIELD_NAMES]
    renamed = dataclasses.make_dataclass("Renamed", names)(*(getattr(BASE, name) for name in FIELD_NAMES))
    assert CacheNamespace.digest(renamed) != BASE.digest()


@pytest.mark.parametrize(
    ("left", "right"), [(1, 1.0), (1, True), (1, "1"), ("1", b"1"), (None, ""), (None, ()), (0, False), (0.0, -0.0)]
)
def test_equal_looking_values_of_different_types_differ(left: object, right: object) -> None:
    assert with_rope(("theta", left)) != with_rope(("theta", right))


def test_nesting_is_part_of_the_value() -> None:
    assert with_rope(("factors", ((1, 2), (3,)))) != with_rope(("factors", ((1,), (2, 3))))


def test_a_value_without_canonical_bytes_is_refused_by_field_name() -> None:
    with pytest.raises(NamespaceError, match="field rope holds a dict"):
        dataclasses.replace(BASE, rope={"theta": 1.0}).digest()
