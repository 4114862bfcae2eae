"""Random models of every family compute what a plain implementation of their configuration computes."""

from pathlib import Path

import numpy as np
import pytest
from dense_step import DenseModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_decoder import plain_logits
from random_family import ARCHITECTURES, RandomModel, random_models

from models import load_model

IDS = np.random.default_rng(0).integers(0, 32, 24)


def assert_equals_the_plain_implementation(model: RandomModel, directory: Path) -> None:
    # Loaded for just this length, so that what turns long sequences otherwise does so here.
    got = DenseModel(load_model(model.write(directory), max_context=len(IDS)), len(IDS)).logits(IDS)
    wanted = plain_logits(model.config, model.tensors, IDS)
    assert np.abs(got - wanted).max() <= 1e-3 * max(1.0, float(np.abs(wanted).max())), model.config


@pytest.mark.parametrize("family", ARCHITECTURES)
@settings(max_examples=2, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_model_equals_the_plain_implementation(family: str, data: st.DataObject, tmp_path_factory) -> None:
    model = data.draw(random_models(family))
    assert_equals_the_plain_implementation(model, tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ARCHITECTURES)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_random_models_equal_the_plain_implementation(family: str, data: st.DataObject, tmp_path_factory) -> None:
    model = data.draw(random_models(family))
    assert_equals_the_plain_implementation(model, tmp_path_factory.mktemp("model"))
