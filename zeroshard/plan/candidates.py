"""The offloads that "auto" may choose from: those that change nothing, and those that the user allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from ..config.offload import ALLOWANCES, Offload, OffloadChoice
from .advice import MOMENTS, Variant

DELAYED_AFTER = 40
"""The steps before updates are delayed, if that is allowed: as many as in the ZeRO-Offload paper."""
SAVES_MEMORY = ALLOWANCES[:2]
"""The allowances that can make something fit. A delayed update only saves time."""
MOMENT_TITLES = dict(zip(MOMENTS, ("fp32", "bf16", "8-bit"), strict=True))


def offloads(choice: OffloadChoice, stage: int, *, native: bool, halves: bool) -> Iterator[Variant]:
    """The offloads of one stage. ``native``: there is a native kernel. ``halves``: a master can be split."""
    plain = Offload(**choice.limits)
    forms = [plain]
    if native and halves:
        forms += [replace(plain, split_master=True), replace(plain, split_master=True, read_back=True)]
    if stage == 3:
        forms += [replace(form, parameters="cpu") for form in forms if not form.read_back]
    for form in forms:
        yield Variant(title(form), form)
    if native and halves:
        forms = [form for form in forms if form.split_master]  # the same bits with fewer bytes to move
    for moments in MOMENTS if native and "moments" in choice.allow else MOMENTS[:1]:
        for form in (replace(form, moments=moments) for form in forms):
            found = [form] if form.moments != plain.moments else []
            if "update_in_backward" in choice.allow:
                found.append(replace(form, update_in_backward=True))
            if "delayed_update_after" in choice.allow and not form.read_back:
                found.append(replace(form, delayed_update_after=DELAYED_AFTER))
            yield from (Variant(title(offload), offload) for offload in found)


def more_allowed(choice: OffloadChoice) -> Iterator[OffloadChoice]:
    """The same choice with more allowances that save memory, as few as possible first."""
    more = [name for name in SAVES_MEMORY if name not in choice.allow]
    for count in range(1, len(more) + 1):
        for names in combinations(more, count):
            yield replace(choice, allow=(*choice.allow, *names))


class Use(NamedTuple):
    """An allowance that an offload uses, as messages name it, and the offload that would change less."""

    name: str
    instead: str
    milder: Offload


def used(offload: Offload) -> Iterator[Use]:
    """The allowances that an offload uses."""
    if offload.moments != MOMENTS[0]:
        milder = MOMENTS[MOMENTS.index(offload.moments) - 1]
        name, instead = f"{MOMENT_TITLES[offload.moments]} moments", f"with {MOMENT_TITLES[milder]} ones"
        yield Use(name, instead, replace(offload, moments=milder))
    if offload.update_in_backward:
        yield Use("update_in_backward", "without it", replace(offload, update_in_backward=False))
    if offload.delayed_update_after is not None:
        name = f"delayed_update_after={offload.delayed_update_after}"
        yield Use(name, "without it", replace(offload, delayed_update_after=None))


def title(offload: Offload | None) -> str:
    """A short name of an offload that "auto" may choose."""
    if offload is None:
        return "none"
    words = ["cpu"]
    words += ["split master"] if offload.split_master else []
    words += ["read back"] if offload.read_back else []
    words += ["parameters too"] if offload.parameters == "cpu" else []
    words += [use.name for use in used(offload)]
    if offload.host_fraction not in (1, "auto"):
        words.append(f"{offload.host_fraction:.0%} of the states")
    return ", ".join(words)
