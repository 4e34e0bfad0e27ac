"""Which page gets which format: by age, by a budget of bytes, by layer; applied between runs.

A policy is a pure function from what is known of pages to the formats that they should have. It
only ever makes pages smaller, and leaves a page that is not full in a format that tokens are
appended to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from typing import NamedTuple, Protocol

from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.sequences import SequencePool


@dataclasses.dataclass(frozen=True, slots=True)
class PageFacts:
    """What a policy knows of a page. A page of several sequences has the facts of its youngest use.

    Attributes:
        page: its id.
        place: in the block table, from the beginning of the text; 0 is the first page.
        age: pages behind it; 0 is the newest.
        newer: tokens behind its last one.
        full: whether all its tokens are written.
        format: name.
        nbytes: now.
        sizes: bytes in each format that may be used, by name.
        whole: names of formats that are written best as a whole page.
    """

    page: int
    place: int
    age: int
    newer: int
    full: bool
    format: str
    nbytes: int
    sizes: Mapping[str, int]
    whole: frozenset[str]

    def may_become(self, format: str) -> bool:
        """Whether the page can be stored so, and is smaller then.

        Raises:
            ValueError: the cache allows no such format.
        """
        size = self.sizes.get(format)
        if size is None:
            known = ", ".join(self.sizes)
            raise ValueError(f"a policy names the page format {format}; allowed are {known}")
        return size < self.nbytes and (self.full or format not in self.whole)


class Policy(Protocol):
    """Chooses formats."""

    def choose(self, pages: Several[PageFacts]) -> dict[int, str]:
        """New formats, by page; pages that stay as they are are left out.

        Args:
            pages: all pages of one cache.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """Pages from the newest on.

    Attributes:
        format: that they have.
        pages: how many; None: all the rest.
        tokens: at least so many tokens, instead of pages: a page leaves the tier when that many
            are newer than its last one.
    """

    format: str
    pages: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        _refuse_negative(self, "pages", "tokens")


@dataclasses.dataclass(frozen=True)
class ByAge:
    """Newest pages in the first tier, older ones in later tiers.

        ByAge([("FLOAT16", 4), ("INT8", 32), ("INT4", None)], first=1)

    Attributes:
        tiers: newest first; the last one takes all the rest.
        first: pages at the beginning of a text that keep the format they have: attention sinks
            (Xiao et al., https://arxiv.org/abs/2309.17453).
        first_format: what those become instead; None: nothing.
    """

    tiers: Several[Tier | tuple[str, int | None]]
    first: int = 0
    first_format: str | None = None

    def __post_init__(self) -> None:
        _refuse_negative(self, "first")
        tiers = tuple(t if isinstance(t, Tier) else Tier(*t) for t in self.tiers)
        if not tiers or any(t.pages is None and t.tokens is None for t in tiers[:-1]):
            raise ValueError("every tier but the last one needs a number of pages or tokens")
        if tiers[-1].pages is not None or tiers[-1].tokens is not None:
            raise ValueError("the last tier takes all the rest: it has no number")
        object.__setattr__(self, "tiers", tiers)

    def choose(self, pages: Several[PageFacts]) -> dict[int, str]:
        """See ``Policy.choose``."""
        chosen = {facts.page: self._format(facts) for facts in pages}
        return {f.page: name for f in pages if (name := chosen[f.page]) and f.may_become(name)}

    def _format(self, facts: PageFacts) -> str | None:
        if facts.place < self.first:
            return self.first_format
        pages = tokens = 0
        for tier in self.tiers:
            assert isinstance(tier, Tier)
            pages += tier.pages or 0
            tokens += tier.tokens or 0
            if tier.tokens is not None and facts.newer < tokens:
                return tier.format
            if tier.tokens is None and (tier.pages is None or facts.age < pages):
                return tier.format
        raise AssertionError("the last tier takes all the rest")


@dataclasses.dataclass(frozen=True)
class Within:
    """As few bytes as asked for, taken from the oldest pages first.

        Within(256 << 20, ["INT8", "INT4"], newest=1, first=1)

    Pages become ``formats[0]`` one by one, oldest first, until the rest fits; when all have it, the
    next format begins with the oldest. The newest pages and the first ones are left alone: with
    these alone it may be more than ``nbytes`` (``Report.fits``).

    Attributes:
        nbytes: most bytes of all pages of the caches that the policy is applied to.
        formats: from the first that is tried to the smallest.
        newest: pages that keep their format, at the end of each text.
        first: and at its beginning.
    """

    nbytes: int
    formats: Several[str]
    newest: int = 1
    first: int = 1

    def __post_init__(self) -> None:
        _refuse_negative(self, "nbytes", "newest", "first")

    def choose(self, pages: Several[PageFacts]) -> dict[int, str]:
        """See ``Policy.choose``."""
        chosen: dict[int, str] = {}
        size = {facts.page: facts.nbytes for facts in pages}
        total = sum(size.values())
        free = [f for f in pages if f.age >= self.newest and f.place >= self.first]
        free.sort(key=lambda facts: -facts.age)
        for format in self.formats:
            for facts in free:
                if total <= self.nbytes:
                    return chosen
                if facts.may_become(format) and facts.sizes[format] < size[facts.page]:
                    total += facts.sizes[format] - size[facts.page]
                    size[facts.page] = facts.sizes[format]
                    chosen[facts.page] = format
        return chosen


@dataclasses.dataclass(frozen=True)
class ByLayer:
    """Another policy for some caches: layers differ in what they bear.

    Attributes:
        policies: by name of the cache.
        otherwise: of all others; None: they are left alone.
    """

    policies: Mapping[str, Policy]
    otherwise: Policy | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What applying a policy has done.

    Attributes:
        before: bytes of all pages.
        after: likewise.
        converted: by cache, the new formats by page.
        limit: bytes that were asked for; None: there was no such wish.
    """

    before: int
    after: int
    converted: Mapping[str, Mapping[int, str]]
    limit: int | None = None

    @property
    def fits(self) -> bool:
        """Whether it is as few bytes as asked for."""
        return self.limit is None or self.after <= self.limit


def apply(policy: Policy | ByLayer, target: SequencePool | PagedCache) -> Report:
    """Convert pages between runs. Each page is converted whole, or left as it was.

    A budget (``Within``) is shared by the caches of a pool in equal parts.

    Args:
        policy: what to do.
        target: a pool; or a cache of one text, whose pages are in order of their ids.

    Raises:
        ValueError: a cache does not allow a format that the policy names, or no cache has a name
            that it names.
        errors.BindingInUse: a run is going on.
        MemoryError: the system has no room for a page; those before it are converted.
    """
    caches = target.caches if isinstance(target, SequencePool) else (target,)
    if isinstance(policy, ByLayer):
        unknown = set(policy.policies) - {cache.name for cache in caches}
        if unknown:
            raise ValueError(f"a policy names {sorted(unknown)}, and there is no such cache")
    before = sum(cache.nbytes for cache in caches)
    converted: dict[str, Mapping[int, str]] = {}
    uses = _uses(target)
    for cache in caches:
        mine = _of_layer(policy, cache, len(caches))
        if mine is None:
            continue
        found = mine.choose(_facts(cache, uses))
        for page, name in found.items():
            cache.convert(page, name)
        if found:
            converted[cache.name] = found
    after = sum(cache.nbytes for cache in caches)
    return Report(before, after, converted, policy.nbytes if isinstance(policy, Within) else None)


def _of_layer(policy: Policy | ByLayer, cache: PagedCache, caches: int) -> Policy | None:
    if isinstance(policy, ByLayer):
        return policy.policies.get(cache.name, policy.otherwise)
    if isinstance(policy, Within):
        return dataclasses.replace(policy, nbytes=policy.nbytes // caches)
    return policy


def _refuse_negative(policy: object, *fields: str) -> None:
    for field in fields:
        number = getattr(policy, field)
        if number is not None and number < 0:
            raise ValueError(f"{type(policy).__name__}: {field} is {number}, and negative")


class _Use(NamedTuple):
    """Where a page stands in a text; smaller is younger."""

    newer: int
    age: int
    place: int


def _uses(target: SequencePool | PagedCache) -> dict[int, _Use]:
    """The youngest use of each page, the same in all caches of a pool."""
    uses: dict[int, _Use] = {}
    for pages, length in _texts(target):
        for place, page in enumerate(pages):
            newer = max(length - (place + 1) * target.page_size, 0)
            use = _Use(newer, len(pages) - 1 - place, place)
            uses[page] = min(uses.get(page, use), use)
    return uses


def _facts(cache: PagedCache, uses: Mapping[int, _Use]) -> list[PageFacts]:
    """What is known of the pages that texts use; others wait for a later text."""
    names = [format.name for format in cache.formats]
    sizes = dict(zip(names, cache.store.codec.page_bytes, strict=True))
    whole = frozenset(f.name for f in cache.formats if not f.appendable)
    table = cache.store.table
    facts = []
    for page, use in uses.items():
        row = cache.store.row(page)
        name, full = names[table.format[row]], int(table.fill[row]) == cache.page_size
        facts.append(
            PageFacts(page, use.place, use.age, use.newer, full, name, sizes[name], sizes, whole)
        )
    return facts


def _texts(target: SequencePool | PagedCache) -> Iterable[tuple[Several[int], int]]:
    """Block table and length of each sequence."""
    if isinstance(target, PagedCache):
        pages = list(target)
        fill = target.page(pages[-1]).fill if pages else 0
        yield pages, max(len(pages) - 1, 0) * target.page_size + fill
        return
    for sequence in target.sequences:
        yield sequence.pages, sequence.length
