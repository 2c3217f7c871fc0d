"""The generation of a CPU, which the model name of a virtual machine often hides ("AMD EPYC").

Model numbers as in the Linux kernel: arch/x86/kernel/cpu/amd.c ("Figure out Zen generations") and
arch/x86/include/asm/intel-family.h; Zen+ (models 8 and 18h of family 17h, there counted as Zen) and the steppings of
Skylake's successors as in the vendors' revision guides and specification updates.
"""

import re
from typing import NamedTuple


class Generation(NamedTuple):
    """models, steppings: inclusive ranges; the first generation that holds a CPU is its own."""

    name: str
    vendor: str
    family: int
    models: tuple[tuple[int, int], ...]
    steppings: tuple[int, int] = (0, 255)


AMD, INTEL = "AuthenticAMD", "GenuineIntel"

GENERATIONS = (
    Generation("Zen+", AMD, 0x17, ((0x08, 0x08), (0x18, 0x18))),
    Generation("Zen", AMD, 0x17, ((0x00, 0x2F), (0x50, 0x5F))),
    Generation("Zen 2", AMD, 0x17, ((0x30, 0x4F), (0x60, 0x7F), (0x90, 0x91), (0xA0, 0xAF))),
    Generation("Zen 3", AMD, 0x19, ((0x00, 0x0F), (0x20, 0x5F))),
    Generation("Zen 4", AMD, 0x19, ((0x10, 0x1F), (0x60, 0xAF))),
    Generation("Zen 5", AMD, 0x1A, ((0x00, 0x2F), (0x40, 0x4F), (0x60, 0x7F))),
    Generation("Skylake-SP", INTEL, 6, ((0x55, 0x55),), (0, 4)),
    Generation("Cascade Lake", INTEL, 6, ((0x55, 0x55),), (5, 7)),
    Generation("Cooper Lake", INTEL, 6, ((0x55, 0x55),), (10, 11)),
    Generation("Ice Lake-SP", INTEL, 6, ((0x6A, 0x6A), (0x6C, 0x6C))),
    Generation("Sapphire Rapids", INTEL, 6, ((0x8F, 0x8F),)),
    Generation("Emerald Rapids", INTEL, 6, ((0xCF, 0xCF),)),
    Generation("Granite Rapids", INTEL, 6, ((0xAD, 0xAE),)),
)


def microarchitecture(vendor: str, family: int, model: int, stepping: int) -> str | None:
    """Its name, None for a CPU that is not in the table."""
    for each in GENERATIONS:
        known = (each.vendor, each.family) == (vendor, family) and each.steppings[0] <= stepping <= each.steppings[1]
        if known and any(first <= model <= last for first, last in each.models):
            return each.name
    return None


def of_cpuinfo(text: str) -> str | None:
    """The same for the first processor in the text of ``/proc/cpuinfo``."""
    found = dict(re.findall(r"^(vendor_id|cpu family|model|stepping)\s*:\s*(\S+)", text.partition("\n\n")[0], re.M))
    numbers = [found.get(name, "") for name in ("cpu family", "model", "stepping")]
    if not all(number.isdigit() for number in numbers):
        return None
    family, model, stepping = map(int, numbers)
    return microarchitecture(found.get("vendor_id", ""), family, model, stepping)
