"""The identity of a cache: everything that changes the K/V of identical token ids.

Contract: two requests may share pages only if their namespaces have the same `digest`. The digest enumerates the
dataclass's own fields, so a field added here is in it from that day; names and values are length-delimited and every
value carries its type, so no two namespaces can serialize alike. Weights, tokenizer, adapters, prompt embeddings and
multimodal inputs enter as digests of their *content*: a name or a path can be rebound to other bytes.
"""

import hashlib
import struct
from dataclasses import dataclass, fields

from kv_common.errors import JaxkvError

NamespaceValue = bool | int | float | str | bytes | None | tuple["NamespaceValue", ...]
Parameters = tuple[tuple[str, NamespaceValue], ...]


class NamespaceError(JaxkvError):
    """A namespace field holds a value with no canonical bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNamespace:
    """What K/V depends on besides the token ids.

    Attributes:
        weights_fingerprint: digest of the weights' content, as stored (so quantization included).
        revision: the revision that the user asked for, "" if none.
        model_config: configuration that the weights do not show (norm epsilon, windows, soft caps), as pairs.
        rope: rotary embedding parameters, as pairs.
        compute_dtype: dtype that the K and V projections run in.
        tokenizer_fingerprint: digest of the tokenizer's content.
        kv_dtype: dtype of the pools; kv_quantization: how values become that dtype, "" for a plain cast.
        layout: `KvStorageLayoutV1.page_geometry`; the number of pages is not part of a page's content.
        kv_head_shards: tensor-parallel width that splits a page.
        adapter_fingerprint: digest of the adapter's content, None without one.
        tenant: tenant or salt; requests of different tenants never share.
        prompt_embeddings: digest of embeddings given in place of tokens, None without.
        multimodal_inputs: digest of the images or sound that the prompt refers to, None without.
    """

    weights_fingerprint: bytes
    revision: str
    model_config: Parameters
    rope: Parameters
    compute_dtype: str
    tokenizer_fingerprint: bytes
    kv_dtype: str
    kv_quantization: str
    layout: Parameters
    kv_head_shards: int
    adapter_fingerprint: bytes | None = None
    tenant: str = ""
    prompt_embeddings: bytes | None = None
    multimodal_inputs: bytes | None = None

    def digest(self) -> bytes:
        """32 bytes that differ whenever any field differs. Raises NamespaceError for a value that it cannot encode."""
        hasher = hashlib.sha256(b"jaxkv.CacheNamespace.v1")
        for field in fields(self):
            hasher.update(_delimited(b"n", field.name.encode()))
            hasher.update(_encode(getattr(self, field.name), field.name))
        return hasher.digest()


def _delimited(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload


def _encode(value: object, field_name: str) -> bytes:
    """Canonical bytes of one value: a type tag, the length, the content."""
    if value is None:
        return _delimited(b"0", b"")
    if isinstance(value, bool):  # before int, which bool is too
        return _delimited(b"b", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _delimited(b"i", str(value).encode())
    if isinstance(value, float):
        return _delimited(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return _delimited(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _delimited(b"y", value)
    if isinstance(value, tuple):
        return _delimited(b"t", b"".join(_encode(item, field_name) for item in value))
    raise NamespaceError(
        f"cache namespace field {field_name} holds a {type(value).__name__}: "
        f"give None, bool, int, float, str, bytes or a tuple of them"
    )
