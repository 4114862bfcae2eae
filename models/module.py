"""Modules: plain objects that describe their parameters, and take real ones for the length of a call.

A module's attributes are its parts: parameters, modules, and whatever else it is built from. `parameters` lists the
first by path; `bind` makes a module whose parameters are those of a tree, which may be tracers. Nothing here is
mutable state: a step's function binds its argument and calls the result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from kv_kernels.tensor_parallel import Split


class Parameter(NamedTuple):
    """A parameter's description: its shape, as an abstract array or weight, and how tensor parallelism spreads it."""

    value: Any
    split: Split = "whole"


class Module:
    """What has parameters."""

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by its dotted path, in the order in which they were set; of a module that is not bound."""
        found: dict[str, Parameter] = {}
        for name, part in vars(self).items():
            if isinstance(part, Parameter):
                found[name] = part
            elif isinstance(part, Module):
                found |= {f"{name}.{path}": parameter for path, parameter in part.parameters().items()}
        return found

    def bind(self, params: Mapping[str, Any]) -> Self:
        """This module with the values of `params`, nested dicts by attribute, in the place of its parameters; what else
        is in there is left.

        Raises KeyError where one is missing.
        """
        bound = copy.copy(self)
        for name, part in vars(self).items():
            if isinstance(part, Parameter):
                setattr(bound, name, params[name])
            elif isinstance(part, Module):
                setattr(bound, name, part.bind(params[name]))
        return bound
