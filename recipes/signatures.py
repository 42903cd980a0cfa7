"""Names of the arguments of classes and functions, read from their source: importing them may take many seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

#: Classes that hand on the keywords that they do not name, each with the class that takes them.
_HANDED_ON = {"lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.distributed.DistributedDataParallel"}

_Definition = ast.ClassDef | ast.FunctionDef


@lru_cache
def argument_names(target: str) -> frozenset[str] | None:
    """Names of the arguments that a class or a function takes.

    Args:
        target: module and name, e.g. ``"lightning.pytorch.Trainer"``. Nothing of the module is imported or run.

    Returns:
        The names, without ``self``; None where the source does not say them all.
    """
    module, _, name = target.rpartition(".")
    try:
        found = _definition(module, name)
        return None if found is None else _names(*found)
    except (OSError, SyntaxError, ValueError, ImportError, RecursionError):
        return None  # the call itself will say what is wrong with its arguments


def _names(module: str, definition: _Definition) -> frozenset[str] | None:
    if isinstance(definition, ast.FunctionDef):
        return None if definition.args.kwarg else _listed(definition)
    names: frozenset[str] = frozenset()
    for home, ancestor in _ancestry(module, definition):
        starts = [n for n in ancestor.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        start = starts[-1] if starts else None  # those before it are overloads
        if start is None and _is_dataclass(ancestor):
            return names | {n.target.id for n in ancestor.body if _is_field(n)}  # type: ignore[attr-defined]
        if start is None:
            continue
        names |= _listed(start) | _of_typed_dict(home, start)
        if start.args.kwarg is None:
            return names
        further = _HANDED_ON.get(f"{home}.{ancestor.name}")
        if further is not None:
            others = argument_names(further)
            return None if others is None else names | others
    return None


def _listed(function: ast.FunctionDef) -> frozenset[str]:
    given = function.args
    return frozenset(argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)) - {"self"}


def _of_typed_dict(module: str, function: ast.FunctionDef) -> frozenset[str]:
    """Names of the TypedDict that the decorator `frameworks.distributed.takes` gives a constructor."""
    names: frozenset[str] = frozenset()
    for node in function.decorator_list:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "takes":
            (record,) = node.args
            found = _definition(module, record.id) if isinstance(record, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                for _, ancestor in _ancestry(found[0], found[1]):
                    names |= {n.target.id for n in ancestor.body if _is_field(n)}  # type: ignore[attr-defined]
    return names


def _is_dataclass(definition: ast.ClassDef) -> bool:
    names = (node.func if isinstance(node, ast.Call) else node for node in definition.decorator_list)
    return any(isinstance(name, ast.Name) and name.id == "dataclass" for name in names)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _ancestry(module: str, definition: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class and the classes that it inherits from, each with the module that defines it, in the order of calls."""
    yield module, definition
    for base in definition.bases:
        generic = base.value if isinstance(base, ast.Subscript) else base  # ``Base[Item]`` is of the class ``Base``
        found = _definition(module, generic.id) if isinstance(generic, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield from _ancestry(found[0], found[1])


def _definition(module: str, name: str) -> tuple[str, _Definition] | None:
    """The module that defines a name, and the definition; imports of the name are followed."""
    tree = _tree(module)
    if tree is None:
        return None
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
            return module, statement
    for node in ast.walk(tree):  # also below ``if TYPE_CHECKING``
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _definition(node.module, alias.name)
    return None


@lru_cache
def _tree(module: str) -> ast.Module | None:
    """The source of a module, parsed; None where there is no source."""
    package, *parts = module.split(".")
    spec = find_spec(package)  # of the outermost package only: that of a module inside would import the packages
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder).joinpath(*parts)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    return None
