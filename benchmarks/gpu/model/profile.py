"""Where a block's cycles went: its critical path by functions and lines of the sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from .ptx import Frames, Kernel

Tree = dict[str, "Node"]


class Node:
    """A function as it is called (or was inlined) from another one."""

    def __init__(self) -> None:
        self.cycles = 0.0
        self.own = 0.0
        self.calls: Tree = {}


def tree_of(kernel: Kernel, path: Mapping[int, float]) -> Node:
    """Sort the cycles of a critical path by who called whom; a function counts what it calls."""
    root = Node()
    for place, cycles in path.items():
        node = root
        node.cycles += cycles
        for name in names_of(kernel.code[place].frames):
            node = node.calls.setdefault(name, Node())
            node.cycles += cycles
        node.own += cycles
    return root


def names_of(frames: Frames) -> list[str]:
    """Give the functions from the kernel to the innermost one, each once in a row."""
    names = [frame.function for frame in frames]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def lines_of(kernel: Kernel, path: Mapping[int, float]) -> Counter[str]:
    """Sum the cycles of a critical path by lines of the sources."""
    found: Counter[str] = Counter()
    for place, cycles in path.items():
        frames = kernel.code[place].frames
        where = f"{frames[-1].file}:{frames[-1].line}" if frames else "?"
        found[where] += int(cycles)
    return found


def describe(kernel: Kernel, path: Mapping[int, float], least: float = 0.02) -> str:
    """Write the tree, without what took less than a share of all."""

    def rows(tree: Tree, depth: int, floor: float) -> Iterator[str]:
        for name, node in sorted(tree.items(), key=lambda item: -item[1].cycles):
            if node.cycles < floor:
                continue
            own = f", {node.own:.0f} its own" if node.calls and node.own >= floor else ""
            yield f"{'  ' * depth}{node.cycles:6.0f} {name}{own}"
            yield from rows(node.calls, depth + 1, floor)

    root = tree_of(kernel, path)
    return "\n".join(rows(root.calls, 0, least * root.cycles))
