"""The nodes of the prefix trie: one full page each, named by the id of its page, linked to parent and siblings.

A node is found by its key, and believed only if its tokens and its parent are the ones asked for; a root belongs to one
namespace, by the namespace's own bytes. So a key may collide: the second content is not found and cannot be attached.
Arrays over all page ids, hence no allocation and no free list of nodes; links both ways, hence a leaf leaves in O(1).
Chains come and go vectorised, with one dict operation a page; only pages that have siblings are handled one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_control.key_changes import KeyChangeRecord, KeyChanges

NO_NODE = 0
"""The padding page, which is never cached."""


class PrefixNodesError(JaxkvError):
    """Nodes whose links contradict each other: a bug of this program, not of its input."""


class PrefixNodes:
    """Nodes 1 .. num_pages - 1 are pages, those from num_pages on are roots of namespaces."""

    def __init__(self, num_pages: int, tokens_per_page: int) -> None:
        self._num_pages = num_pages
        # Entries of pages that are not attached mean nothing.
        self._tokens = np.zeros((num_pages, tokens_per_page), np.int32)
        self._key = [b""] * num_pages
        self._parent = np.zeros(num_pages, np.int32)
        self._older = np.zeros(num_pages, np.int32)
        self._newer = np.zeros(num_pages, np.int32)
        # A root lives while it has a child, so there are never more roots than pages.
        self._newest_child = np.zeros(2 * num_pages, np.int32)
        self._child_count = np.zeros(2 * num_pages, np.int32)
        self._changes = KeyChangeRecord()
        self._page_of: dict[bytes, int] = {}
        self.clear()

    def __len__(self) -> int:
        """Pages attached."""
        return len(self._page_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._page_of

    def clear(self) -> None:
        """Forget every node."""
        self._changes.remove(self._page_of)
        self._page_of = {}
        self._root_of: dict[bytes, int] = {}
        self._namespace_of: dict[int, bytes] = {}
        self._closed_roots: list[int] = []
        # Contents of first pages under any namespace, with the number of namespaces that have them.
        self._first_pages: Counter[bytes] = Counter()

    def take_changes(self) -> KeyChanges:
        """Which keys were attached and detached since the last call; at the first, all that are attached."""
        return self._changes.take(self._page_of)

    def key_of(self, page: int) -> bytes:
        """The key under which an attached page is found."""
        return self._key[page]

    def root_of(self, namespace: bytes) -> int:
        """The root of the namespace with this digest; NO_NODE while nothing is attached below it."""
        return self._root_of.get(namespace, NO_NODE)

    def starts_some_path(self, tokens: NDArray[np.int32]) -> bool:
        """Whether a page of `tokens` [tokens_per_page] is attached to the root of any namespace."""
        return tokens.tobytes() in self._first_pages

    def walk(self, parent: int, keys: Sequence[bytes], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The longest path below `parent` whose pages have these `keys` [n] and `tokens` [n, tokens_per_page].

        int32 [<= n], in order from the parent; empty below NO_NODE.
        """
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        path = np.array(found, np.int32)
        if not found:
            return path
        expected_parent = np.array([parent, *found[:-1]], np.int32)
        sound = (self._parent[path] == expected_parent) & (self._tokens[path] == tokens[: path.size]).all(axis=1)
        return path if sound.all() else path[: int(sound.argmin())]

    def newest_children(self, node: int, limit: int) -> NDArray[np.int32]:
        """Up to `limit` children of `node`, the one attached last first."""
        children: list[int] = []
        child = int(self._newest_child[node])
        while child != NO_NODE and len(children) < limit:
            children.append(child)
            child = int(self._older[child])
        return np.array(children, np.int32)

    def tokens_of(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens of `pages` [n]: int32 [n, tokens_per_page]."""
        return self._tokens[pages]

    def count_free(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are neither taken nor repeated: so many can be attached."""
        seen: set[bytes] = set()
        for key in keys:
            if key in self._page_of or key in seen:
                break
            seen.add(key)
        return len(seen)

    def attach(
        self,
        parent: int,
        pages: NDArray[np.int32],
        keys: Sequence[bytes],
        tokens: NDArray[np.int32],
        *,
        namespace: bytes | None = None,
    ) -> None:
        """Hang the chain `pages` [n >= 1] below `parent`; `keys` [n] are free, `tokens` [n, tokens_per_page].

        With NO_NODE for a parent, below a new root of `namespace`.
        """
        if parent == NO_NODE:
            if namespace is None:
                raise PrefixNodesError(f"page {pages[0]} has neither a parent nor a namespace: give one of them")
            parent = self._open_root(namespace)
        ids = pages.tolist()
        first = ids[0]
        self._page_of.update(zip(keys, ids, strict=True))
        self._changes.store(keys)
        for page, key in zip(ids, keys, strict=True):
            self._key[page] = key
        self._tokens[pages] = tokens
        if len(ids) > 1:
            self._parent[pages[1:]] = pages[:-1]
            self._older[pages] = NO_NODE
            self._newer[pages] = NO_NODE
            self._newest_child[pages[:-1]] = pages[1:]
            self._child_count[pages] = 1
        self._newest_child[ids[-1]] = NO_NODE
        self._child_count[ids[-1]] = 0
        sibling = int(self._newest_child[parent])
        self._parent[first] = parent
        self._older[first] = sibling
        self._newer[first] = NO_NODE
        if sibling != NO_NODE:
            self._newer[sibling] = first
        self._newest_child[parent] = first
        self._child_count[parent] += 1
        if parent >= self._num_pages:
            self._first_pages[tokens[0].tobytes()] += 1

    def detach(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Take those of distinct `pages` [n] out whose children, if any, are among them; return these, in order."""
        going = pages
        np.subtract.at(self._child_count, self._parent[going], 1)
        while (stays := self._child_count[going] > 0).any():
            np.add.at(self._child_count, self._parent[going[stays]], 1)
            going = going[~stays]
        parents = self._parent[going]
        only_child = (self._older[going] == NO_NODE) & (self._newer[going] == NO_NODE)
        self._newest_child[parents[only_child]] = NO_NODE
        for page in going[~only_child].tolist():
            self._unlink(page)
        for page in going.tolist():
            del self._page_of[self._key[page]]
        self._changes.remove(self._key[page] for page in going.tolist())
        for page in going[parents >= self._num_pages].tolist():
            self._forget_first_page(page)
        return going

    def subtree(self, page: int) -> NDArray[np.int32]:
        """`page` and all below it, no page before its parent."""
        found = [page]
        for node in found:  # which grows meanwhile
            found += self.newest_children(node, self._num_pages).tolist()
        return np.array(found, np.int32)

    def check_invariants(self, cached: NDArray[np.bool_]) -> None:
        """Raise PrefixNodesError unless the attached pages are the `cached` [num_pages] ones and all links agree."""
        pages = np.array(sorted(self._page_of.values()), np.int32)
        nodes = np.concatenate([pages, np.array(sorted(self._namespace_of), np.int32)])
        children = {node: self.newest_children(node, self._num_pages).tolist() for node in nodes.tolist()}
        first = [page for page in pages.tolist() if self._parent[page] >= self._num_pages]
        agreed = {
            "attached and cached pages": np.array_equal(pages, np.flatnonzero(cached)),
            "keys": all(self._key[page] == key for key, page in self._page_of.items()),
            "roots": {root: namespace for namespace, root in self._root_of.items()} == self._namespace_of,
            "parents and children": sorted(c for below in children.values() for c in below) == pages.tolist()
            and all(self._parent[child] == node for node, below in children.items() for child in below),
            "child counts": all(self._child_count[node] == len(below) for node, below in children.items()),
            "roots and their children": all(children[root] for root in self._namespace_of),
            "first pages": Counter(self._tokens[page].tobytes() for page in first) == self._first_pages,
        }
        for what, holds in agreed.items():
            if not holds:
                raise PrefixNodesError(f"{what} disagree among {pages.size} nodes: the trie is broken")

    def _open_root(self, namespace: bytes) -> int:
        root = self._closed_roots.pop() if self._closed_roots else self._num_pages + len(self._root_of)
        self._root_of[namespace] = root
        self._namespace_of[root] = namespace
        self._newest_child[root] = NO_NODE
        self._child_count[root] = 0
        return root

    def _unlink(self, page: int) -> None:
        """Join the neighbours of a page among its siblings."""
        older, newer = int(self._older[page]), int(self._newer[page])
        if older != NO_NODE:
            self._newer[older] = newer
        if newer != NO_NODE:
            self._older[newer] = older
        else:
            self._newest_child[self._parent[page]] = older

    def _forget_first_page(self, page: int) -> None:
        content = self._tokens[page].tobytes()
        self._first_pages[content] -= 1
        if not self._first_pages[content]:
            del self._first_pages[content]
        root = int(self._parent[page])
        if root in self._namespace_of and self._child_count[root] == 0:
            del self._root_of[self._namespace_of.pop(root)]
            self._closed_roots.append(root)
