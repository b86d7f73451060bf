"""The registry of scheduling policies.

A policy is a class in a file of its own in `sched/policies/`, decorated with `register`; the
engine, the simulator, the commands and the tests then know it. A policy elsewhere is named
`path/to/file.py:name`, or `path/to/file.py` if the file has no other, and a notebook's cell may use
`register` too.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxserve.sched.cache.retention import LRU, Retention
from jaxserve.sched.cache.ttl import Ttl
from jaxserve.sched.cache.worth import Worth
from jaxserve.sched.parameters import text_of, with_parameters
from jaxserve.sched.policy import Policy


@dataclass(frozen=True)
class PolicyEntry:
    """A registered scheduling policy.

    Attributes:
        name: Value of `--policy`.
        make: Makes a new policy with its default parameters.
        summary: One line for listings.
        source: The paper and section that the policy comes from.
        ablation: Whether it is another policy without one of its parts, so that comparisons of
            policies may leave it out.
        for_programs: Whether it schedules programs, so that comparisons on requests by themselves
            may leave it out.
    """

    name: str
    make: Callable[[], Policy]
    summary: str
    source: str
    ablation: bool = False
    for_programs: bool = False

    @property
    def deployable(self) -> bool:
        """Whether the live server accepts it."""
        return not self.make().hypothetical


@dataclass(frozen=True)
class Variant:
    """A registered suffix, `name+suffix`, which changes a policy.

    Attributes:
        suffix: Without the `+`.
        of: Returns the changed policy. Raises ValueError for policies that it cannot change.
        summary: One line for listings.
        source: The paper and section that the variant comes from.
    """

    suffix: str
    of: Callable[[Policy], Policy]
    summary: str
    source: str


_Make = TypeVar("_Make", bound=Callable[[], Policy])
_Change = TypeVar("_Change", bound=Callable[[Policy], Policy])
_OWN = "jaxserve.sched."
_FILE = re.compile(r".+\.py(?=[:+]|$)")
_REGISTRY: dict[str, PolicyEntry] = {}
_VARIANTS: dict[str, Variant] = {}


def register(
    name: str,
    summary: str,
    source: str,
    *,
    ablation: bool = False,
    for_programs: bool = False,
) -> Callable[[_Make], _Make]:
    """Decorator: registers a policy class, or a function that returns a policy, as `name`.

    Running the same definition again, as notebook cells do, replaces the earlier one.

    Args:
        name, summary, source, ablation, for_programs: See `PolicyEntry`.

    Raises:
        ValueError: The name is taken, empty, or contains `+`, `:`, `,` or `=`.
    """
    if not name or set(name) & set("+:,="):
        raise ValueError(f"a policy's name must be without + : , and =, got {name!r}")

    def add(make: _Make) -> _Make:
        known = _REGISTRY.get(name)
        if known is not None and _origin(known.make) != _origin(make):
            raise ValueError(f"two policies are named {name!r}")
        _REGISTRY[name] = PolicyEntry(name, make, summary, source, ablation, for_programs)
        return make

    return add


def register_variant(suffix: str, summary: str, source: str) -> Callable[[_Change], _Change]:
    """Decorator: registers a function from policy to policy as the suffix `+suffix`."""

    def add(of: _Change) -> _Change:
        _VARIANTS[suffix] = Variant(suffix, of, summary, source)
        return of

    return add


def policies() -> dict[str, PolicyEntry]:
    """Every registered policy by name, without variants; imports the files in
    `sched/policies/` and its folders."""
    _import_built_in()
    return dict(sorted(_REGISTRY.items()))


@functools.cache
def _import_built_in() -> None:
    """Imports them once, since searching the folders takes longer than making a policy."""
    package = importlib.import_module("jaxserve.sched.policies")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def variants() -> dict[str, Variant]:
    """Every suffix that a policy's name may have."""
    policies()
    return dict(sorted(_VARIANTS.items()))


@dataclass(frozen=True)
class PolicyName:
    """A parsed policy name, such as `path/to/file.py:mine+ef:watermark=0.02`.

    Attributes:
        path: The policy's file; "" for a registered policy.
        base: The name without suffixes; "" for the only policy of the file.
        suffixes: Suffixes of variants, in order.
        params: Parameter values as text, by name.
    """

    path: str
    base: str
    suffixes: tuple[str, ...]
    params: dict[str, str]

    @classmethod
    def parse(cls, name: str, what: str = "policy") -> PolicyName:
        """Splits a name. ValueError for parameters that are not `NAME=VALUE`, or occur twice. what:
        for messages."""
        file = _FILE.match(name)
        path = file[0] if file else ""
        rest = name.removeprefix(path)
        if path and "=" not in rest.partition(":")[2].partition(":")[0]:
            rest = rest.removeprefix(":")  # otherwise a parameter follows, not a name
        whole, *texts = rest.split(":")
        base, *suffixes = whole.split("+")
        params: dict[str, str] = {}
        for text in texts:
            key, equals, value = text.partition("=")
            if not (key and equals):
                raise ValueError(
                    f"{what} {name!r}: parameters are :NAME=VALUE after the name, got {text!r}"
                )
            if key in params:
                raise ValueError(f"{what} {name!r}: {key} is given twice")
            params[key] = value
        return cls(path, base, tuple(suffixes), params)


def make_policy(name: str, **params: Any) -> Policy:
    """Makes a new policy from its name: `sarathi`, `sarathi+ef`, `path/to/file.py:mine`. Parameters
    may follow: `aptserve:slo_decay=0.4:watermark=0.02`.

    Args:
        name: The name, with or without parameters.
        **params: More parameters: fields of the policy's dataclass.

    Raises:
        ValueError: The name, a parameter or the file is wrong; the message says how.
    """
    policies()  # so that a file cannot take built-in names
    said = PolicyName.parse(name)
    twice = sorted(said.params.keys() & params.keys())
    if twice:
        raise ValueError(f"policy {name!r}: {twice[0]} is given twice")
    base = said.base
    if said.path:
        found = _load(said.path)
        base = base or _only(found, said.path)
    policy = _made(_known("policy", base, policies()))
    if not isinstance(policy, Policy):
        what = f"{type(policy).__name__} is not derived from jaxserve.sched.policy.Policy"
        raise ValueError(f"policy {base!r}: {what}")
    for suffix in said.suffixes:
        before, policy = policy, _known("policy variant", suffix, _VARIANTS).of(policy)
        if before.speculates:  # not a field, so it would be lost
            object.__setattr__(policy, "speculates", True)
    shown = "+".join([base, *said.suffixes])
    return with_parameters(shown, policy, {**said.params, **params})


RETENTIONS: dict[str, Callable[[], Retention]] = {LRU: Retention, "ttl": Ttl, "worth": Worth}


def make_retention(name: str) -> Retention:
    """Makes the retention policy of cached pages from its name and parameters: `lru`, `ttl`, or
    `worth:best_effort=0.1`. ValueError says what is wrong."""
    base = name.partition(":")[0]
    said = PolicyName.parse(name, "retention").params
    return with_parameters(base, _known("retention", base, RETENTIONS)(), said, "retention")


def _made(entry: PolicyEntry) -> object:
    """The policy of the entry. Since its code may be anybody's, its exceptions become
    ValueErrors."""
    try:
        return entry.make()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"policy {entry.name!r} cannot be made: {problem}") from error


def is_built_in(name: str) -> bool:
    """Whether the policy and all its variants are defined in this package, whose tests check them
    against the limits. ValueError as in `make_policy`."""
    said = PolicyName.parse(name)
    if said.path:
        return False
    makers: list[Callable[..., Policy]] = [_known("policy", said.base, policies()).make]
    makers += [_known("policy variant", suffix, _VARIANTS).of for suffix in said.suffixes]
    return all((_origin(make)[0] or "").startswith(_OWN) for make in makers)


def deployable(*, for_programs: bool = True) -> list[str]:
    """Names of the built-in policies that the live server accepts. for_programs: also of those that
    schedule programs."""
    return [
        name
        for name, one in policies().items()
        if one.deployable and is_built_in(name) and (for_programs or not one.for_programs)
    ]


def full_name(name: str, params: Mapping[str, Any]) -> str:
    """The name with more parameters, as text for `make_policy`."""
    return "".join([name, *(f":{key}={text_of(value)}" for key, value in params.items())])


_Entry = TypeVar("_Entry")


def _known(what: str, name: str, known: dict[str, _Entry]) -> _Entry:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no {what} {name!r}{hint} Known: {', '.join(known)}")
    return known[name]


def _origin(make: Callable[..., Policy]) -> tuple[str | None, str | None]:
    return getattr(make, "__module__", None), getattr(make, "__qualname__", None)


def _load(path: str) -> list[str]:
    """Runs a policy's file, which registers its policies. Returns their names."""
    before = dict(_REGISTRY)
    full = Path(path).expanduser().resolve()
    if not full.is_file():
        raise ValueError(f"there is no policy file {path}")
    module_name = "jaxserve_policy_file:" + str(full)
    spec = importlib.util.spec_from_file_location(module_name, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"policy file {path}: {type(error).__name__}: {error}") from error
    return [name for name, entry in _REGISTRY.items() if entry is not before.get(name)]


def _only(names: list[str], path: str) -> str:
    """The only policy of a file; ValueError if it has none, or several."""
    if not names:
        raise ValueError(f"policy file {path}: registers no policy")
    if len(names) > 1:
        raise ValueError(f"policy file {path}: has {', '.join(names)}; name one, {path}:{names[0]}")
    return names[0]
