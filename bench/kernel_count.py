"""How many kernels a compiled program launches, read from its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^\n]*\) -> [^\n]*)?\{$")
_CALLED = re.compile(r"(?:to_apply|calls|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

# Instructions that move no data: names, views, and second halves of asynchronous pairs.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "optimization-barrier",
        "partition-id",
        "replica-id",
        "domain",
    }
)


@dataclass(frozen=True, slots=True)
class _Instruction:
    opcode: str
    text: str


def count_kernels(program_text: str) -> int:
    """Kernels that one run of a program launches.

    A fusion, library call or plain operation is one kernel, and so is a collective. Calls (command buffers among them)
    count what they hold, loops what runs in them as often as the compiler knows it to (else once), conditionals the
    cheapest of their branches.

    Args:
        program_text: optimised HLO, `compiled.as_text()`.
    """
    computations, entry = _parse(program_text)
    return _count(entry, computations)


def _parse(text: str) -> tuple[Mapping[str, Sequence[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line.strip()) if not line.startswith("  ") else None
        if header is not None:
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif line.startswith("  ") and " = " in line and name:
            computations[name].append(_Instruction(_opcode(line.split(" = ", 1)[1]), line))
    if not entry:
        raise ValueError("the program text has no ENTRY computation")
    return computations, entry


def _opcode(definition: str) -> str:
    """The word between an instruction's type, which may be a tuple in parentheses, and its operands."""
    depth = 0
    for place, character in enumerate(definition):
        depth += (character in "({[") - (character in ")}]")
        if character == " " and depth == 0:
            return definition[place + 1 :].split("(", 1)[0]
    raise ValueError(f"not an instruction: {definition}")


def _count(name: str, computations: Mapping[str, Sequence[_Instruction]]) -> int:
    return sum(_launches(instruction, computations) for instruction in computations[name])


def _launches(instruction: _Instruction, computations: Mapping[str, Sequence[_Instruction]]) -> int:
    opcode, text = instruction.opcode, instruction.text
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    called = _CALLED.findall(text)
    if opcode == "call":
        return _count(called[0], computations)
    if opcode == "while":
        trips = _TRIPS.search(text)
        once = sum(_count(part, computations) for part in called)
        return once * (int(trips[1]) if trips else 1)
    if opcode == "conditional":
        listed = _BRANCHES.search(text)
        branches = [part.strip().lstrip("%") for part in listed[1].split(",")] if listed else called
        return min(_count(branch, computations) for branch in branches)
    return 1
