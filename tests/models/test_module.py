"""Modules: their parameters by path, and what binding puts in their place."""

import jax
import pytest

from models.module import Module, Parameter


class Leaf(Module):
    def __init__(self, size: int) -> None:
        self.size = size
        self.weight = Parameter(jax.ShapeDtypeStruct((size,), "float32"), "outputs")
        self.bias: Parameter | None = None


class Tree(Module):
    def __init__(self) -> None:
        self.second = Leaf(2)
        self.first = Leaf(1)
        self.scale = Parameter(jax.ShapeDtypeStruct((), "float32"))


def test_parameters_are_listed_by_path_in_the_order_they_were_set() -> None:
    found = Tree().parameters()
    assert list(found) == ["second.weight", "first.weight", "scale"]
    assert found["second.weight"].value.shape == (2,)
    assert [each.split for each in found.values()] == ["outputs", "outputs", "whole"]


def test_a_bound_module_has_the_values_and_the_description_stays() -> None:
    tree = Tree()
    bound = tree.bind({"first": {"weight": 10}, "second": {"weight": 20}, "scale": 30})
    assert (bound.first.weight, bound.second.weight, bound.scale) == (10, 20, 30)
    assert (bound.second.size, bound.second.bias) == (2, None)
    assert isinstance(tree.second.weight, Parameter)
    assert len(tree.parameters()) == 3


def test_a_parameter_that_the_values_lack_is_named() -> None:
    with pytest.raises(KeyError, match="weight"):
        Tree().bind({"first": {}, "second": {"weight": 20}, "scale": 30})
