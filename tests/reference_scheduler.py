"""What one step of the engine does, in plain Python: no arrays, no vectorisation, nothing clever.

A page is an object with a set of owners: slots, and INDEX for the prefix index. Physical page numbers do not exist
here; the test tells each page its number, for one purpose: entries that tie in the order of eviction go by number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from kvjax.prefix import FOREVER
from kvjax.requests import CANCELLED, LENGTH, PIN_SECONDS, RUNNING, STOPPED, TOO_LONG, WAITING

INDEX = "index"
Tokens = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Page:
    """A page of K and V. What follows `owners` has a meaning only while the prefix index owns it.

    Attributes:
      owners: slot numbers, and INDEX.
      last_use: step at which it last gained or lost an owner.
      salt: of the requests that may use it.
      tokens: the R tokens on it.
      parent: the page before it; None for a first page.
      depth: how many pages are before it.
      live: second at which it can no longer be found, unless a slot owns it; counted from the end of its last owner.
      pinned: second up to which it is not evicted for others; likewise.
      number: where it lies on the device, once the test has looked.
    """

    owners: set[Hashable]
    last_use: int
    salt: str = ""
    tokens: Tokens = ()
    parent: Page | None = None
    depth: int = 0
    live: int = 0
    pinned: int = 0
    number: int | None = None

    @property
    def prefix(self) -> Tokens:
        """All tokens up to the end of the page."""
        return (self.parent.prefix if self.parent else ()) + self.tokens


@dataclasses.dataclass(eq=False)
class Request:
    """A request between submission and collection; the names are those of `kvjax.requests.Requests`."""

    order: int
    tokens: list[int]
    prompt: int
    limit: int
    salt: str = ""
    pins: tuple[int, int] = (0, 0)
    stop: int | None = None
    status: int = WAITING
    hashed: int = 0
    hit: int = 0
    preempted: int = 0

    def __post_init__(self):
        self.resumed = self.known > self.prompt

    @property
    def known(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(eq=False)
class Slot:
    """A running request: its pages, and how many of its tokens are on them."""

    number: int
    request: Request
    pages: list[Page] = dataclasses.field(default_factory=list)
    cached: int = 0

    @property
    def pending(self) -> int:
        return self.request.known - self.cached


@dataclasses.dataclass
class Match:
    """Pages found in the index that continue what a request has, and how many of them no slot uses."""

    pages: list[Page]
    idle: int


class Scheduler:
    """The engine's state, and what a step makes of it.

    Attributes:
      slots: by number; None where idle.
      line: who waits.
      requests: by order, until they are collected.
      index: pages that can be shared.
      free: how many pages have no owner.
      blocked: the first in the line did not fit, and no page was given back since.
      steps: run so far.
      computed, hit, preempted, evicted, copied: counters.
      peak: most pages with an owner at once.
      expired, unpinned: of the evicted pages, those past their time, and those pinned still.
    """

    def __init__(self, slots: int, rows: int, pages: int, packed: int, following: Callable[[Sequence[int]], int]):
        """`following`: the token that the model generates after these."""
        self.rows, self.pages, self.packed, self.following = rows, pages, packed, following
        self.slots: list[Slot | None] = [None] * slots
        self.line: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.index: list[Page] = []
        self.free = pages
        self.blocked = False
        self.steps = 0
        self.computed = self.hit = self.preempted = self.evicted = self.copied = self.expired = self.unpinned = 0
        self.peak = 0

    # --- the host's side --------------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.hashed = request.known // self.rows
            self.requests[request.order] = request
            self.line.append(request)
        self.blocked = False

    def cancel(self, orders: Sequence[int], clock: int, ttl: int) -> None:
        for order in orders:
            request = self.requests[order]
            if request.status == WAITING:
                self.line.remove(request)
                request.status = CANCELLED
            elif request.status == RUNNING:
                request.status = CANCELLED
                self.vacate(next(slot for slot in self.running if slot.request is request), clock, ttl)
        self.blocked = False

    def collect(self, order: int) -> Request:
        assert self.requests[order].status > RUNNING
        return self.requests.pop(order)

    @property
    def running(self) -> list[Slot]:
        return [slot for slot in self.slots if slot is not None]

    @property
    def unfinished(self) -> bool:
        return bool(self.running or self.line)

    # --- pages ------------------------------------------------------------------------------------------------
    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.rows)

    def least(self, request: Request) -> int:
        """Pages for what a request knows and one token more, unless that is its last, which needs no row."""
        return self.pages_for(min(request.known + 1, request.limit - 1))

    def new_page(self, owner: Hashable) -> Page:
        assert self.free > 0
        self.free -= 1
        return Page({owner}, self.steps)

    def disown(self, page: Page, owner: Hashable) -> None:
        page.owners.remove(owner)
        if not page.owners:
            self.free += 1

    def vacate(self, slot: Slot, clock: int, ttl: int) -> None:
        """Frees a slot and gives back its pages; those in the index stay, used just now."""
        for column, page in enumerate(slot.pages):
            page.last_use = self.steps
            self.touch(page, slot.request, column, clock, ttl)
            self.disown(page, slot.number)
        self.slots[slot.number] = None
        self.blocked = False

    # --- the prefix index -------------------------------------------------------------------------------------
    def find(self, salt: str, parent: Page | None, tokens: Tokens, clock: int) -> Page | None:
        """The page with these tokens after that page, unless its time is over and no slot uses it."""
        for page in self.index:
            alive = clock < page.live or page.owners != {INDEX}
            if alive and page.salt == salt and page.parent is parent and page.tokens == tokens:
                return page
        return None

    def find_pages(self, request: Request, held: list[Page], clock: int) -> Match:
        """Page after page of what the request knows and has digests of."""
        found = list(held)
        while len(found) < min(request.hashed, request.known // self.rows):
            start = len(found) * self.rows
            tokens = tuple(request.tokens[start : start + self.rows])
            page = self.find(request.salt, found[-1] if found else None, tokens, clock)
            if page is None:
                break
            found.append(page)
        new = found[len(held) :]
        return Match(new, sum(page.owners == {INDEX} for page in new))

    def touch(self, page: Page, request: Request, column: int, clock: int, ttl: int) -> None:
        """The page lives a full time from now on, and is pinned if the request pins it."""
        page.live = max(page.live, min(clock + ttl, FOREVER))
        for tokens, seconds in zip(request.pins, PIN_SECONDS, strict=True):
            if (column + 1) * self.rows <= tokens:
                page.pinned = max(page.pinned, min(clock + seconds, FOREVER))

    def evictable(self, clock: int, pinned_too: bool) -> list[Page]:
        """Pages that no slot owns."""
        return [page for page in self.index if page.owners == {INDEX} and (pinned_too or page.pinned <= clock)]

    def evict(self, clock: int, pinned_too: bool) -> bool:
        """Frees the page to go first: not pinned, past its time, least recently used, deepest."""
        candidates = self.evictable(clock, pinned_too)
        if not candidates:
            return False

        def order(page: Page) -> tuple:
            assert page.number is not None
            age = -1 if page.live <= clock else page.last_use
            return page.pinned > clock, age, -page.depth, page.number

        page = min(candidates, key=order)
        self.index.remove(page)
        self.disown(page, INDEX)
        self.evicted += 1
        self.expired += page.live <= clock
        self.unpinned += page.pinned > clock
        return True

    # --- one step ---------------------------------------------------------------------------------------------
    def step(self, clock: int, ttl: int, refill: int) -> None:
        self.admit(clock, ttl, refill)
        plan = self.schedule()
        starved, cached = self.reserve(plan, clock)
        self.steps += 1
        ended = self.sample({number: tokens for number, tokens in plan.items() if number not in starved})
        self.register(cached, clock)
        if starved and not ended:
            self.give_way(clock, ttl)
        for slot in ended:
            self.vacate(slot, clock, ttl)

    # --- admission --------------------------------------------------------------------------------------------
    def admit(self, clock: int, ttl: int, refill: int) -> None:
        """Waiting requests enter idle slots in order, while pages suffice; slots become owners of what they find."""
        idle = [number for number, slot in enumerate(self.slots) if slot is None]
        looking = [slot for slot in self.running if self.looks(slot)]
        matches = {slot: self.find_pages(slot.request, slot.pages, clock) for slot in looking}
        enough = len(idle) >= min(refill, len(self.line)) or not self.running
        if self.line and idle and enough and not self.blocked:
            matches |= self.enter(idle, clock)
        for slot, match in matches.items():
            self.take_over(slot, match.pages)
        self.fork_tails()

    def looks(self, slot: Slot) -> bool:
        """Whether a slot has more than one token to compute, and stands at the beginning of a page."""
        return slot.pending > 1 and slot.cached % self.rows == 0

    def enter(self, idle: list[int], clock: int) -> dict[Slot, Match]:
        """Starts requests that fit; nothing that they find is taken yet."""
        alone = not self.running
        owed = sum(self.least(slot.request) - len(slot.pages) for slot in self.running)
        room = self.free - owed + len(self.evictable(clock, False))
        started = {}
        for rank, (number, request) in enumerate(zip(idle, list(self.line), strict=False)):
            least = self.least(request)
            if least > self.pages:
                request.status = TOO_LONG
                self.line.remove(request)
                continue
            match = self.find_pages(request, [], clock)
            copy = 1 if len(match.pages) * self.rows >= request.known else 0  # the last token's page is written again
            room -= least - len(match.pages) + match.idle + copy
            if room < 0 and not (alone and rank == 0):
                self.blocked = not alone
                break
            self.line.remove(request)
            request.status = RUNNING
            slot = Slot(number, request)
            started[slot] = match
        for slot in started:
            self.slots[slot.number] = slot
        return started

    def take_over(self, slot: Slot, pages: list[Page]) -> None:
        """A slot becomes an owner of indexed pages; the last known token is always computed."""
        if not pages:
            return
        request = slot.request
        for page in pages:
            page.owners.add(slot.number)
            page.last_use = self.steps
            slot.pages.append(page)
        before = slot.cached
        slot.cached = max(before, min(len(slot.pages) * self.rows, request.known - 1))
        self.count_hit(request, slot.cached - before)

    def count_hit(self, request: Request, tokens: int) -> None:
        """What a request had computed itself, before it gave way or was submitted again, is no hit."""
        if request.known != request.prompt or request.preempted:
            return
        assert request.hit + tokens < request.prompt
        request.hit += tokens
        self.hit += tokens

    def fork_tails(self) -> None:
        """Where another slot has computed the same prompt, its last, unfilled page is shared, too."""

        def takes(slot: Slot) -> bool:
            request = slot.request
            whole = (request.prompt - 1) // self.rows * self.rows
            return (
                self.looks(slot)
                and request.known == request.prompt
                and slot.cached == whole
                and request.prompt - 1 > whole
            )

        takers = [slot for slot in self.running if takes(slot)]
        givers = [s for s in self.running if s not in takers and s.cached >= s.request.prompt - 1]
        for slot in takers:
            request, column = slot.request, len(slot.pages)
            for giver in givers:
                if self.tail(giver.request) == self.tail(request) and giver.pages[:column] == slot.pages:
                    page = giver.pages[column]
                    page.owners.add(slot.number)
                    page.last_use = self.steps
                    slot.pages.append(page)
                    self.count_hit(request, request.prompt - 1 - slot.cached)
                    slot.cached = request.prompt - 1
                    break

    def tail(self, request: Request) -> tuple:
        """The prompt without its last token."""
        return request.salt, tuple(request.tokens[: request.prompt - 1])

    # --- the plan ---------------------------------------------------------------------------------------------
    def schedule(self) -> dict[int, int]:
        """Tokens by slot number: decode rows first, then prompts, oldest first, cut to whole pages."""
        plan = {slot.number: 1 for slot in self.running if slot.pending == 1}
        left = self.packed - len(plan)
        prompts = [slot for slot in self.running if slot.pending > 1]
        computing = [slot for slot in prompts if not self.follows(slot, prompts)]
        for slot in sorted(computing, key=lambda slot: slot.request.order):
            tokens = min(left, slot.pending)
            left = max(0, left - slot.pending)  # who is cut short leaves nothing to those behind
            if tokens < slot.pending:
                whole = (slot.cached + tokens) // self.rows * self.rows - slot.cached
                tokens = whole if whole > 0 else tokens
            if tokens:
                plan[slot.number] = tokens
        return plan

    def follows(self, slot: Slot, prompts: list[Slot]) -> bool:
        """Whether a slot at the beginning of a page waits for another, further on or older, to compute that page."""
        key = self.next_page(slot)
        if key is None or slot.cached % self.rows:
            return False
        return any(
            self.next_page(other) == key and (-other.cached, other.request.order) < (-slot.cached, slot.request.order)
            for other in prompts
        )

    def next_page(self, slot: Slot) -> tuple | None:
        """What the page that a slot computes next will hold: a full page, or the end of a prompt."""
        request = slot.request
        end = (slot.cached // self.rows + 1) * self.rows
        if end <= min(request.known, request.hashed * self.rows):
            return "full", request.salt, tuple(request.tokens[:end])
        if request.known == request.prompt:
            return "tail", *self.tail(request)
        return None

    # --- pages for the step -----------------------------------------------------------------------------------
    def reserve(self, plan: dict[int, int], clock: int) -> tuple[set[int], dict[Slot, int]]:
        """Lengthens slots and takes the pages that needs: the starved slots' numbers, and the lengths before."""
        cached = {slot: slot.cached for slot in self.running}
        need = {slot: self.need(slot, plan.get(slot.number, 0)) for slot in self.running}
        while self.free < sum(need.values()):
            if not self.evict(clock, pinned_too=len(self.running) == 1):
                break
        starved, needed = set(), 0
        for slot in self.running:
            needed += need[slot]
            if need[slot] and needed > self.free:
                starved.add(slot.number)
        served = [slot for slot in self.running if plan.get(slot.number) and slot.number not in starved]
        self.separate([slot for slot in served if self.writes_shared(slot)])
        for slot in served:
            slot.cached += plan[slot.number]
            self.computed += plan[slot.number]
            while len(slot.pages) < self.pages_for(slot.cached):
                slot.pages.append(self.new_page(slot.number))
        self.peak = max(self.peak, self.pages - self.free)
        return starved, cached

    def need(self, slot: Slot, tokens: int) -> int:
        if tokens == 0:
            return 0
        return self.pages_for(slot.cached + tokens) - len(slot.pages) + self.writes_shared(slot)

    def writes_shared(self, slot: Slot) -> bool:
        """Whether the page that a slot goes on to fill has other owners."""
        return slot.cached % self.rows > 0 and len(slot.pages[slot.cached // self.rows].owners) > 1

    def separate(self, writers: list[Slot]) -> None:
        """Gives writers pages of their own. Of several that write to a page that nobody else owns, one keeps it."""
        shared: dict[Page, list[Slot]] = {}
        for slot in writers:
            shared.setdefault(slot.pages[slot.cached // self.rows], []).append(slot)
        for page, slots in shared.items():
            everyone_writes = page.owners == {slot.number for slot in slots}
            for slot in slots[1:] if everyone_writes else slots:
                self.disown(page, slot.number)
                slot.pages[slot.cached // self.rows] = self.new_page(slot.number)
                self.copied += 1

    # --- after the step ---------------------------------------------------------------------------------------
    def sample(self, tokens: dict[int, int]) -> list[Slot]:
        """The next token where the last known one was computed; the slots whose requests ended."""
        ended = []
        for slot in self.running:
            request = slot.request
            if not tokens.get(slot.number) or slot.pending:
                continue
            token = self.following(request.tokens)
            request.tokens.append(token)
            if token == request.stop:
                request.status = STOPPED
            elif request.known >= request.limit:
                request.status = LENGTH
            if request.status != RUNNING:
                ended.append(slot)
        return ended

    def register(self, cached: dict[Slot, int], clock: int) -> None:
        """Enters filled pages into the index; one that the index has already is swapped for that one."""
        for slot, before in cached.items():
            for column in range(before // self.rows, slot.cached // self.rows):
                self.register_page(slot, column, clock)

    def register_page(self, slot: Slot, column: int, clock: int) -> None:
        request, page = slot.request, slot.pages[column]
        request.hashed = max(request.hashed, column + 1)
        parent = slot.pages[column - 1] if column else None
        assert parent is None or parent in self.index
        assert page.owners == {slot.number}
        tokens = tuple(request.tokens[column * self.rows : (column + 1) * self.rows])
        twin = self.find(request.salt, parent, tokens, clock)
        if twin is None:
            page.salt, page.tokens, page.parent, page.depth = request.salt, tokens, parent, column
            page.owners.add(INDEX)
            self.index.append(page)
        else:
            self.disown(page, slot.number)
            self.blocked = False
            twin.owners.add(slot.number)
            slot.pages[column] = page = twin
        page.last_use = self.steps

    def give_way(self, clock: int, ttl: int) -> None:
        """The newest request goes back to the front of the line; the only one ends TOO_LONG."""
        newest = max(self.running, key=lambda slot: slot.request.order)
        request = newest.request
        if len(self.running) == 1:
            request.status = TOO_LONG
        else:
            request.status = WAITING
            request.preempted += 1
            self.preempted += 1
            self.line.insert(0, request)
        self.vacate(newest, clock, ttl)
