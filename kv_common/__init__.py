"""The vocabulary that the control plane and the execution layer share: standard library and numpy only."""

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE, KvStorageLayoutV1, LayoutError, layout_for_budget
from kv_common.model_spec import ModelSpec, ModelSpecError
from kv_common.namespace import CacheNamespace, NamespaceError
from kv_common.page_table import KvPageTableV1, PageTableError

__version__ = "0.1.0"

__all__ = [
    "PADDING_PAGE",
    "CacheNamespace",
    "JaxkvError",
    "KvPageTableV1",
    "KvStorageLayoutV1",
    "LayoutError",
    "ModelSpec",
    "ModelSpecError",
    "NamespaceError",
    "PageTableError",
    "layout_for_budget",
]
