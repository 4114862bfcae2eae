"""What a checkpoint has behind the last layer: a matrix over the vocabulary, perhaps a copy of the embedding, or a
classification head of a few labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from models.checkpoint import Checkpoint, CheckpointError
from models.config import UnsupportedModelError
from models.config_fields import shortened
from models.families import Family

logger = logging.getLogger(__name__)

_CLASSIFIER, _GENERATOR = "ForSequenceClassification", "ForCausalLM"
_HEADLESS = ("Model", "TextModel")


class _Droppable(Checkpoint, Protocol):
    def drop(self, name: str) -> None: ...


def labels_of(raw: dict[str, Any], family: Family, *, tied: bool) -> tuple[str, ...] | None:
    """The names of the labels that config.json's architecture gives a sequence; none where it has no head at all, and
    None where it generates text, with a matrix of its own or the embedding where they are `tied`.

    Raises UnsupportedModelError: it does none of these, or for another family.
    """
    stated = raw.get("architectures") or []
    stated = stated if isinstance(stated, list) else [stated]
    classifiers = {name.replace(_GENERATOR, _CLASSIFIER) for name in family.hf_architectures}
    headless = {name.replace(_GENERATOR, end) for name in family.hf_architectures for end in _HEADLESS}
    unknown = sorted(str(each) for each in stated if str(each) not in family.hf_architectures | classifiers | headless)
    if unknown:
        raise UnsupportedModelError(
            f"config.json has architectures={shortened(unknown[0])} where model_type is {family.name!r}, implemented "
            f"there is {' or '.join(sorted(family.hf_architectures | classifiers))}: use a model of those, or correct "
            "the field that is wrong"
        )
    if any(str(each) in headless for each in stated):
        return None if tied else ()
    if not any(str(each) in classifiers for each in stated):
        return None
    labels = raw.get("id2label")
    # Configurations leave out what is the default of two.
    labels = labels if isinstance(labels, dict) and labels else {"0": "LABEL_0", "1": "LABEL_1"}
    return tuple(str(labels.get(str(number), f"LABEL_{number}")) for number in range(len(labels)))


def drop_tied_copy(checkpoint: _Droppable, names: Mapping[str, str]) -> None:
    """Some writers save the tied output matrix as well; a copy is dropped, a different one is a contradiction."""
    copy, original = names["output.weight"], names["embedding.weight"]
    if copy not in checkpoint.names or original not in checkpoint.names:
        return
    ours, theirs = checkpoint.read(original), checkpoint.read(copy)
    if not (isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray) and np.array_equal(ours, theirs)):
        raise CheckpointError(
            f"{checkpoint.origin}: {copy} differs from {original} though tie_word_embeddings is true: fix the "
            "configuration"
        )
    logger.info("%s: %s is a copy of %s and is not loaded", checkpoint.origin, copy, original)
    checkpoint.drop(copy)
