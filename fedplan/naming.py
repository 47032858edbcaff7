# SPDX-License-Identifier: Apache-2.0
"""Registries: find methods, tasks, metrics and other plug-ins by the name that a study gives."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fedplan.errors import FedplanError

T = TypeVar("T")

BUILT_IN = "fedplan"
"""Origin of the names that fedplan itself defines."""
_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
"""`package.module:attribute`; file paths and nested attributes do not match."""
_ALLOWED_PACKAGES: ContextVar[frozenset[str] | None] = ContextVar("allowed", default=None)
"""Packages that names may be imported from; None allows all."""


class UnknownName(FedplanError):
    """A name that is not defined here, or that this site does not let a study import."""

    code = "unknown-name"


@dataclass(frozen=True)
class NamedObject(Generic[T]):
    """An object found by name, and its origin; returned by `Registry.find`.

    `value`: the object, such as a function. `origin`: "fedplan", "package 1.2" (an entry point) or
    "package.module". `module`: the module that defines the name; "" for names of fedplan itself.
    """

    name: str
    value: T
    origin: str
    module: str = ""

    @property
    def code_fingerprint(self) -> str:
        """Origin and digests of the source code behind the name; "" for names of fedplan itself.

        A digest covers all Python files of a top-level package: sites with different code get
        different fingerprints. Code without a file, as in a notebook, is not covered: its digest is
        that of no bytes.
        """
        if not self.module:
            return ""
        digests = dict[str, str]()
        for module in (self.module, _module_of(self.value)):
            package = module.partition(".")[0]
            if not package or package == BUILT_IN:
                continue
            spec = find_spec(package) if package != "__main__" else None
            folders = list(spec.submodule_search_locations or ()) if spec else []
            digest = hashlib.sha256()
            for folder in map(Path, folders):
                for file in sorted(folder.rglob("*.py")):
                    path = file.relative_to(folder).as_posix().encode()
                    digest.update(path + b"\0" + file.read_bytes())
            if spec and not folders and spec.origin and Path(spec.origin).is_file():
                digest.update(Path(spec.origin).read_bytes())
            digests[package] = digest.hexdigest()[:16]
        return f"{self.origin} {digests}"


@contextmanager
def allow_imports(packages: Iterable[str]) -> Generator[None]:
    """Let `Registry.find` import only from these top-level packages during the body.

    Packages that declare a fedplan entry point stay allowed, since the site's owner installed them
    as plug-ins. For any other package `Registry.find` raises UnknownName.
    """
    # A study from the network may name any module, and importing a module runs its code.
    token = _ALLOWED_PACKAGES.set(frozenset(packages))
    try:
        yield
    finally:
        _ALLOWED_PACKAGES.reset(token)


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Objects of one kind by name: built-in, registered in this process, or of other packages.

    `find` returns an object, `make` calls the object, `register` adds an object. Objects of other
    packages are declared by an entry point of `group`, or named as `package.module:attribute` in a
    study. No object can replace a built-in one.
    `kind`: the word for messages, such as "method". `built_in`: fedplan's own objects by name;
    `owner`: the origin of these. `registered`: objects added by `register`.
    """

    kind: str
    built_in: Mapping[str, T]
    owner: str = BUILT_IN
    registered: dict[str, T] = field(default_factory=dict[str, T])

    @property
    def group(self) -> str:
        """Name of the entry-point group, such as `fedplan.methods`."""
        return f"fedplan.{self.kind.replace(' ', '_')}s"

    def find(self, name: str) -> NamedObject[T]:
        """Return the object of a name with its origin; imports the module of a plug-in.

        Searches built-in names, names registered in this process, entry points, then
        `package.module:attribute`. Raises UnknownName if the name is not defined, is offered by two
        packages, cannot be imported, is not callable, or is not allowed here (see `allow_imports`).
        """
        if name in self.built_in:
            return NamedObject(name, self.built_in[name], self.owner)
        if name in self.registered:
            module = _module_of(self.registered[name])
            return NamedObject(name, self.registered[name], module, module)
        points = [point for point in self._entry_points() if point.name == name]
        if len(points) > 1:
            packages = " and ".join(sorted(map(_distribution_of, points)))
            raise UnknownName(
                f"{packages} both offer a {self.kind} {name!r}: uninstall one of them"
            )
        if points:
            (point,) = points
            return NamedObject(name, self._load(name, point), _distribution_of(point), point.module)
        if import_path := _IMPORT_PATH.fullmatch(name):
            module = import_path[1]
            _require_allowed_package(self.kind, name, module)
            value = self._load(name, EntryPoint(name, name, self.group))
            # Rejects `package.module:system` of a module with `from os import system`, too.
            if (defined_in := _module_of(value)).partition(".")[0] != BUILT_IN:
                _require_allowed_package(self.kind, name, defined_in)
            return NamedObject(name, value, module, module)
        raise UnknownName(
            unknown_name_message(self.kind, name, self.origins())
            + "; one of your own is named as package.module:attribute, or is offered by an "
            f"installed package (entry point {self.group})"
        )

    def register(self, name: str, value: T) -> None:
        """Add the object `value` under a name, in this process only; every site must do the same.

        Raises FedplanError if the name has another object, built-in or registered.
        """
        if {**self.registered, **self.built_in}.get(name, value) is not value:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise FedplanError(
                f"there is {article} {self.kind} {name!r} already: give yours another name"
            )
        self.registered[name] = value

    def origins(self) -> dict[str, str]:
        """Return every known name with the origin of its object, without importing anything."""
        installed = dict[str, str]()
        for point in sorted(self._entry_points(), key=_distribution_of):
            others = f"{installed[point.name]} and " if point.name in installed else ""
            installed[point.name] = others + _distribution_of(point)
        registered = {name: _module_of(value) for name, value in self.registered.items()}
        return {**installed, **registered, **dict.fromkeys(self.built_in, self.owner)}

    def make(self, name: str, settings: Mapping[str, Any] | None = None) -> Any:
        """Call the object of a name with the settings as keyword arguments, and return the result.

        Raises UnknownName for an unknown name, and FedplanError for settings that
        `require_settings` rejects.
        """
        factory: Any = self.find(name).value
        require_settings(name, factory, settings or {})
        return factory(**(settings or {}))

    def _entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))

    def _load(self, name: str, point: EntryPoint) -> Any:
        """Import the object of an entry point, and return the object; `name` is for messages."""
        try:
            value = point.load()
        except Exception as error:  # code of other packages may raise anything on import
            raise UnknownName(
                f"the {self.kind} {name!r} cannot be imported: {type(error).__name__}: {error}; "
                "install its package here, the same at every end"
            ) from error
        if not callable(value):
            raise UnknownName(f"the {self.kind} {name!r} is {value!r:.60}, which is not callable")
        return value


def unknown_name_message(kind: str, name: str, known_names: Iterable[str]) -> str:
    """Return the message for an undefined name, with the closest known name or all known names.

    `kind`: the word for the name, such as "method".
    """
    names = sorted(filter(None, known_names))
    by_lower_case = {each.lower(): each for each in names}
    close = get_close_matches(name.lower(), by_lower_case, n=1)
    hint = (
        f"did you mean {by_lower_case[close[0]]}?"
        if close
        else f"there are {', '.join(names) or 'none'}"
    )
    return f"there is no {kind} {name!r}: {hint}"


def require_settings(name: str, factory: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise FedplanError if a factory cannot be called with these settings as keyword arguments.

    Each setting must be a parameter and have the type of the parameter's default (an int is
    accepted for a float), or of its annotation if that default is None. Every parameter needs a
    default. `name`: the factory's name in messages.
    """
    try:
        params = {k: p for k, p in signature(factory).parameters.items() if p.kind not in _VARIADIC}
    except (TypeError, ValueError) as error:
        raise FedplanError(f"{name} has no signature that can be read: {error}") from error
    if missing := [
        k for k, p in params.items() if p.default is Parameter.empty and k not in settings
    ]:
        raise FedplanError(
            f"{name} has no default for {missing[0]!r}: give it one, since studies may leave it out"
        )
    for key, value in settings.items():
        if key not in params:
            raise FedplanError(
                f"{name} takes no {key!r}; it takes {', '.join(params) or 'nothing'}"
            )
        default = params[key].default
        types = {type(default).__name__, *(["int"] if type(default) is float else [])}
        if default is None:
            types = set(str(params[key].annotation).replace(" ", "").split("|"))
            default = True if "bool" in types else default
        if type(value).__name__ not in types:
            raise FedplanError(f"{name} takes {key} such as {default!r}, not {value!r}")


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _require_allowed_package(kind: str, name: str, module: str) -> None:
    """Raise UnknownName if `allow_imports` is active and excludes the top package of a module."""
    allowed, top = _ALLOWED_PACKAGES.get(), module.partition(".")[0]
    if allowed is None or top in allowed:
        return
    all_points = entry_points()
    for group in all_points.groups:
        points = all_points.select(group=group) if group.startswith("fedplan.") else ()
        if any(point.module.partition(".")[0] == top for point in points):
            return
    raise UnknownName(
        f"the {kind} {name!r} is in {top!r}, which this site does not let a study import: install "
        "a package that offers it to fedplan, or set in the site's site.toml: "
        f'allow_packages = ["{top}"]'
    )


def _distribution_of(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module


def _module_of(value: Any) -> str:
    while isinstance(value, partial):
        value = cast("Any", value).func
    return str(getattr(value, "__module__", None) or type(value).__module__)
