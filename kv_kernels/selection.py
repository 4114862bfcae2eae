"""The one place that decides which kernel provider runs, and says why.

`auto` takes the platform's providers in order of speed and the first that supports what the model needs. A provider
asked for by name is taken or refused, with what it lacks and the provider that would serve; it is never swapped for
another in silence.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

from kv_common.errors import JaxkvError
from kv_kernels.aiter import AiterProvider
from kv_kernels.flashinfer import FlashInferProvider
from kv_kernels.native import NativeProvider
from kv_kernels.provider import KernelNeeds, KernelProvider
from kv_kernels.reference import ReferenceProvider

logger = logging.getLogger(__name__)

_PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "reference"),
    "cuda": ("flashinfer", "pallas", "reference"),
    "rocm": ("aiter", "pallas", "reference"),
}
_ANY_PLATFORM = ("reference",)


class ProviderError(JaxkvError):
    """The provider asked for does not exist or cannot serve the model."""


class PlatformError(JaxkvError):
    """The platform that jax was told to use is not there."""


class ChosenProvider(NamedTuple):
    """A provider and the one-line reason for it."""

    provider: KernelProvider
    reason: str


def current_platform() -> str:
    """`cpu`, `cuda`, `rocm` or whatever else runs what jax compiles; jax itself calls the middle two `gpu`.

    Raises PlatformError where jax finds no device of the platforms it was told to use.
    """
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # jax asserts that a platform it was told to use has a plugin
        raise PlatformError(
            "jax finds no device of the platforms that it was told to use: unset JAX_PLATFORMS, or "
            "install what they need"
        ) from error
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def _pallas(needs: KernelNeeds) -> KernelProvider:
    from kv_kernels.pallas import PallasProvider  # with Triton's dialect, which a CPU need not wait for

    return PallasProvider(interpret=needs.platform == "cpu")


_PROVIDERS: dict[str, Callable[[KernelNeeds], KernelProvider]] = {
    "native": lambda needs: NativeProvider(needs.int8_activations),
    "flashinfer": FlashInferProvider,
    "aiter": lambda needs: AiterProvider(),
    "pallas": _pallas,
    "reference": lambda needs: ReferenceProvider(),
}
"""Makes a provider the way it would serve a model."""


def _unsupported(provider: KernelProvider, needs: KernelNeeds) -> str | None:
    if needs.int8_activations and provider.name != "native":
        return "it multiplies activations as they are: leave int8_activations out"
    return provider.unsupported(needs)


def choose_provider(needs: KernelNeeds, requested: str = "auto") -> ChosenProvider:
    """The provider for `needs`; `requested` is `auto` or a provider's name. Raises ProviderError."""
    order = _PREFERENCE.get(needs.platform, _ANY_PLATFORM)
    providers = {name: _PROVIDERS[name](needs) for name in order}
    reasons = {name: _unsupported(provider, needs) for name, provider in providers.items()}
    able = [name for name in order if reasons[name] is None]
    if requested == "auto":
        if not able:
            refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ProviderError(f"no kernel provider for {needs.platform} serves this model ({refused})")
        passed_over = [f"{name}: {reasons[name]}" for name in order[: order.index(able[0])]]
        chosen = ChosenProvider(
            providers[able[0]],
            f"first of {', '.join(order)} for {needs.platform}" + "".join(f"; not {line}" for line in passed_over),
        )
    else:
        if requested not in _PROVIDERS:
            raise ProviderError(f"unknown provider {requested!r}; choose auto or one of {', '.join(_PROVIDERS)}")
        provider = _PROVIDERS[requested](needs)
        reason = _unsupported(provider, needs)
        if reason is not None:
            remedy = f"use provider {able[0]!r}" if able else "no other provider serves it either"
            raise ProviderError(f"provider {requested!r} cannot serve this model: {reason}; {remedy}")
        chosen = ChosenProvider(provider, "asked for by name")
    # Falling back to what is written to be right, not fast, is news; the rest is for whoever asks.
    fell_back = requested == "auto" and chosen.provider.name == "reference" and len(order) > 1
    logger.log(
        logging.WARNING if fell_back else logging.INFO,
        "kernel provider: %s (%s)",
        chosen.provider.name,
        chosen.reason,
    )
    return chosen
