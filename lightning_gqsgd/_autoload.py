"""Registers the strategies with a Lightning package when a script imports that package, without importing it earlier.

`import torch` calls `install` through the entry point group ``torch.backends``, so that ``Trainer(strategy="gqsgd")``
works without an import of ours; TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches that off. An error here would break ``import
torch`` or ``import lightning`` for everybody. So this module imports the standard library only, and the presets when a
Lightning package is loaded. It says what failed instead of raising it, also where warnings are errors.

Lightning comes as ``lightning`` and as ``pytorch_lightning`` (with ``lightning_fabric``), whose classes are not
interchangeable. All four registries get the same names, each with a class of its own flavour.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple


class _Target(NamedTuple):
    registry: str  # name of the registry in the module
    home: str  # our module of the same flavour, in `frameworks`
    strategy: str  # class in it


#: Lightning's modules that hold a strategy registry.
_TARGETS = {
    "lightning.pytorch.strategies": _Target("StrategyRegistry", "trainer_lightning", "GQSGDStrategy"),
    "pytorch_lightning.strategies": _Target("StrategyRegistry", "trainer_pytorch_lightning", "GQSGDStrategy"),
    "lightning.fabric.strategies": _Target("STRATEGY_REGISTRY", "fabric_lightning", "GQSGDFabricStrategy"),
    "lightning_fabric.strategies": _Target("STRATEGY_REGISTRY", "fabric_lightning_fabric", "GQSGDFabricStrategy"),
}

_FRAMEWORKS = "lightning_gqsgd.frameworks"

#: What Lightning appends to the name of its own DDP strategy.
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED_PARAMETERS = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


def install() -> None:
    """Register with the Lightning packages that are loaded, and with others when they are. Idempotent; never raises."""
    try:
        for name in _TARGETS:
            if name in sys.modules:
                _register(name, sys.modules[name])
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _warn(error)


def flavour(first: str, second: str) -> str:
    """Returns our module for one of two packages: the one that is imported, else the one that is installed. If this is
    so of neither or of both, it is the first."""
    has_first, has_second = (sys.modules.get(name) is not None for name in (first, second))
    if not has_first and not has_second:  # a script may import this package before the other one
        has_first, has_second = (find_spec(name.partition(".")[0]) is not None for name in (first, second))
    package = second if has_second and not has_first else first
    return _TARGETS[f"{package}.strategies"].home


def strategy_names() -> dict[str, dict[str, Any]]:
    """Returns the registered names, and the arguments of a strategy that each stands for.

    Each preset has the endings of Lightning's own DDP strategy. Local steps train without DDP, so they have no endings
    for its options.
    """
    from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS  # not when torch is imported: this takes milliseconds

    names = {}
    for preset in (*LOCAL_PRESETS, *PRESETS):
        for method, start_method in _START_METHODS.items():
            for unused, options in _UNUSED_PARAMETERS.items() if preset in PRESETS else [("", {})]:
                names[f"{preset}{method}{unused}"] = {"preset": preset, "start_method": start_method, **options}
    return names


class _Finder(importlib.abc.MetaPathFinder):
    """Finds no module itself. It lets the other finders look for a target, and makes the target's loader call
    `_register` after it has run the module."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TARGETS or self._looking:
            return None
        self._looking = True
        try:
            others = (finder for finder in sys.meta_path if finder is not self)
            specs = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            # On the instance: the loader's class stays what inspect and importlib.resources expect.
            spec.loader.exec_module = _then_register(spec.loader.exec_module, fullname)  # type: ignore[method-assign, assignment]
        return spec


def _then_register(exec_module: Callable[[ModuleType], None], name: str) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        exec_module(module)
        try:
            _register(name, module)
        except Exception as error:
            _warn(error)

    return run


def _register(name: str, module: ModuleType) -> None:
    target = _TARGETS[name]
    registry = getattr(module, target.registry)

    def strategy(**arguments: Any) -> Any:
        """Make a strategy; its class is imported here, and not before."""
        home = importlib.import_module(f"{_FRAMEWORKS}.{target.home}")
        return getattr(home, target.strategy)(**arguments)

    for strategy_name, arguments in strategy_names().items():
        if strategy_name not in registry:
            shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            registry.register(strategy_name, strategy, description=f"Quantised DDP: {shown}", **arguments)
    if "available_strategies" not in vars(registry):
        available = registry.available_strategies
        registry.available_strategies = lambda: _Names(available(), target)


class _Names(list[str]):
    """The strategy names that a registry offers.

    Lightning shows an unknown name, or an object, to ``in`` only, and its error then speaks of its own strategies. So
    ``in`` raises an error of ours for a name that was meant to be ours, and for an object of ours that was made for
    another registry.
    """

    def __init__(self, names: Sequence[str], target: _Target) -> None:
        super().__init__(names)
        self._target = target

    def __contains__(self, given: object) -> bool:
        if super().__contains__(given):
            return True
        if isinstance(given, str) and given.startswith("gqsgd"):
            raise _unknown(given, self)
        homes = {kind.__module__ for kind in type(given).__mro__}
        others = [other for other in _TARGETS.values() if f"{_FRAMEWORKS}.{other.home}" in homes]
        if others and self._target not in others:
            raise _made_for_another(given, self._target)
        return False


def _unknown(name: str, names: Sequence[str]) -> ValueError:
    """Returns the error for an unknown name that begins as ours do; it lists our presets."""
    import difflib  # takes some milliseconds, which `import torch` should not

    from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, bits_of_name

    bits = bits_of_name(name)
    an_object = f"strategy=lightning_gqsgd.GQSGDStrategy(bits={bits or 5})"
    near = ["gqsgd"] if bits == 8 else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = repr(near[0]) if near else ""
    if bits not in (None, 8):  # the name is spelled well, and no strategy has so many bits
        meant = an_object
    hint = f"did you mean {meant}? " if meant else ""
    return ValueError(
        f"unknown strategy {name!r}; {hint}The names are {', '.join(PRESETS)}; for local steps "
        f"{', '.join(LOCAL_PRESETS)}. A name may end with "
        f"{', '.join(suffix for suffix in _START_METHODS if suffix)}, and those of the first list "
        f"with _find_unused_parameters_true. Any other configuration is an object, e.g. {an_object}"
    )


def _made_for_another(strategy: object, target: _Target) -> TypeError:
    """Returns the error for a strategy of ours that was made for another front end or another Lightning package."""
    front_end = next(name for name, one in _TARGETS.items() if one == target).removesuffix(".strategies")
    return TypeError(
        f"strategy={type(strategy).__name__}(...) of {type(strategy).__module__} is not for {front_end}; take "
        f"`from {_FRAMEWORKS}.{target.home} import {target.strategy}`"
    )


def _warn(error: Exception) -> None:
    text = (
        f"lightning_gqsgd could not register its strategies by name ({type(error).__name__}: {error}); "
        "pass GQSGDStrategy() instead of a string"
    )
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # python -W error
        if sys.stderr is not None:  # closed before Python started: `print` would take stdout
            with suppress(OSError, ValueError):  # closed or full since
                print(text, file=sys.stderr)
