# SPDX-License-Identifier: Apache-2.0
"""Naming: what a study calls by name, of fedplan, of this process or of an installed package."""

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

OURS = "fedplan"
"""Whose the names are that everybody has."""
_PLACE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
"""`package.module:attribute`: no path of a file, and no way through one module into another."""
_ALLOWED: ContextVar[frozenset[str] | None] = ContextVar("allowed", default=None)


class UnknownName(FedplanError):
    """A name that stands for nothing here, or for what this site does not let a study import."""

    code = "unknown-name"


@dataclass(frozen=True)
class Found(Generic[T]):
    """What a name stands for, and whose it is: `fedplan`, `package 1.2` or `package.module`.

    `module` is where it was found; of what everybody has there is none.
    """

    name: str
    value: T
    origin: str
    module: str = ""

    @property
    def content(self) -> str:
        """Tells two ends apart whose name is the same and whose code is not.

        It is of all Python files of the package, so that what a function calls there is seen too;
        what was written in a notebook has no file. Of what everybody has, the name says it.
        """
        if not self.module:
            return ""
        tops = [each.partition(".")[0] for each in (self.module, _module_of(self.value))]
        written = {top: _digest(top) for top in tops if top and top != OURS}
        return f"{self.origin} {written}"


def _digest(package: str) -> str:
    """A digest of all that a package is written in."""
    spec = find_spec(package) if package != "__main__" else None
    found, places = hashlib.sha256(), list(spec.submodule_search_locations or ()) if spec else []
    for place in map(Path, places):
        for file in sorted(place.rglob("*.py")):
            found.update(file.relative_to(place).as_posix().encode() + b"\0" + file.read_bytes())
    if spec and not places and spec.origin and Path(spec.origin).is_file():
        found.update(Path(spec.origin).read_bytes())
    return found.hexdigest()[:16]


@contextmanager
def allowing(packages: Iterable[str]) -> Generator[None]:
    """Import for a name only what these packages hold, and those that offer something to fedplan.

    A study that came over a network may name any module, and to import one is to run it. What a
    package offers by an entry point its owner has installed for that.
    """
    token = _ALLOWED.set(frozenset(packages))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@dataclass(frozen=True)
class Registry(Generic[T]):
    """All things of one kind by name: ours, those of this process, those of installed packages.

    A package offers its own by an entry point of the group. `package.module:attribute` needs none.
    What is ours no other can hide.
    """

    kind: str
    built_in: Mapping[str, T]
    owner: str = OURS
    registered: dict[str, T] = field(default_factory=dict[str, T])

    @property
    def group(self) -> str:
        """The group of entry points by which packages offer things of the kind."""
        return f"fedplan.{self.kind.replace(' ', '_')}s"

    def find(self, name: str) -> Found[T]:
        """What a name stands for; the first place that knows it says it."""
        if name in self.built_in:
            return Found(name, self.built_in[name], self.owner)
        if name in self.registered:
            module = _module_of(self.registered[name])
            return Found(name, self.registered[name], module, module)
        offered = [point for point in self._points() if point.name == name]
        if len(offered) > 1:
            both = " and ".join(sorted(map(_offered_by, offered)))
            raise UnknownName(f"{both} both offer a {self.kind} {name!r}: uninstall one of them")
        if offered:
            (point,) = offered
            return Found(name, self._loaded(name, point), _offered_by(point), point.module)
        if place := _PLACE.fullmatch(name):
            return Found(name, self._imported(name, place[1]), place[1], place[1])
        raise self.unknown(name)

    def register(self, name: str, value: T) -> None:
        """Give a name to a thing of your own, in this process alone: every end must do it alike."""
        if {**self.registered, **self.built_in}.get(name, value) is not value:
            raise FedplanError(
                f"there is {_article(self.kind)} {name!r} already: give yours another name"
            )
        self.registered[name] = value

    def names(self) -> dict[str, str]:
        """Every name that can be said, with its origin; nothing is imported for it."""
        offered = dict[str, str]()
        for point in sorted(self._points(), key=_offered_by):
            before = f"{offered[point.name]} and " if point.name in offered else ""
            offered[point.name] = before + _offered_by(point)
        own = {name: _module_of(value) for name, value in self.registered.items()}
        return {**offered, **own, **dict.fromkeys(self.built_in, self.owner)}

    def make(self, name: str, settings: Mapping[str, Any] | None = None) -> Any:
        """What a maker of this name makes; its settings are checked by its signature."""
        make: Any = self.find(name).value
        require_settings(name, make, settings or {})
        return make(**(settings or {}))

    def unknown(self, name: str) -> UnknownName:
        """The error for a name that stands for nothing, with what is nearest to it."""
        return UnknownName(unknown(self.kind, name, self.names()) + f"; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return (
            f"one of your own is named as package.module:attribute, or is offered by an installed "
            f"package (entry point {self.group})"
        )

    def _points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))

    def _loaded(self, name: str, point: EntryPoint) -> Any:
        try:
            value = point.load()
        except Exception as error:  # what others wrote may raise anything when it is imported
            raise UnknownName(
                f"the {self.kind} {name!r} cannot be imported: {type(error).__name__}: {error}; "
                "install its package here, the same at every end"
            ) from error
        if not callable(value):
            raise UnknownName(f"the {self.kind} {name!r} is {value!r:.60}: nothing can call it")
        return value

    def _imported(self, name: str, module: str) -> Any:
        """What stands at a place: of an allowed package, and not merely imported there."""
        _require_allowed(self.kind, name, module)
        value = self._loaded(name, EntryPoint(name, name, self.group))
        if (made_in := _module_of(value)).partition(".")[0] != OURS:
            _require_allowed(self.kind, name, made_in)
        return value


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The words for a name that stands for nothing: the nearest, or all that there are."""
    there = sorted(filter(None, known))
    lower = {each.lower(): each for each in there}
    close = get_close_matches(name.lower(), lower, n=1)
    hint = (
        f"did you mean {lower[close[0]]}?" if close else f"there are {', '.join(there) or 'none'}"
    )
    return f"there is no {kind} {name!r}: {hint}"


def require_settings(name: str, make: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuse settings that a maker does not take, or takes of another type; each has a default."""
    try:
        takes = {k: p for k, p in signature(make).parameters.items() if p.kind not in _ANY}
    except (TypeError, ValueError) as error:
        raise FedplanError(f"{name} does not say what it takes: {error}") from error
    if unset := [k for k, p in takes.items() if p.default is Parameter.empty and k not in settings]:
        raise FedplanError(f"{name} has no default for {unset[0]!r}: a study makes it without")
    for key, value in settings.items():
        if key not in takes:
            raise FedplanError(f"{name} takes no {key!r}; it takes {', '.join(takes) or 'nothing'}")
        usual = takes[key].default
        if type(value) is not type(usual) and not (type(value) is int and type(usual) is float):
            raise FedplanError(f"{name} takes {key} such as {usual!r}, not {value!r}")


_ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _require_allowed(kind: str, name: str, module: str) -> None:
    allowed, top = _ALLOWED.get(), module.partition(".")[0]
    if allowed is None or top in allowed or top in _offering():
        return
    raise UnknownName(
        f"the {kind} {name!r} is of {top!r}, which this site does not let a study import: install "
        f'a package that offers it to fedplan, or allow it in its site.toml: allow = ["{top}"]'
    )


def _offering() -> set[str]:
    """The packages that offer anything to fedplan."""
    there = entry_points()
    groups = [group for group in there.groups if group.startswith("fedplan.")]
    points = (point for group in groups for point in there.select(group=group))
    return {point.module.partition(".")[0] for point in points}


def _offered_by(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module


def _module_of(value: Any) -> str:
    """Where a thing is written: of a partial, what it calls; of a value, its class."""
    while isinstance(value, partial):
        value = cast("Any", value).func
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
