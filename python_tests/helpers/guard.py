"""Tensors next to memory that must not be touched: a read there kills the process (SIGSEGV).

For scripts that run in a process of their own; see test_memory.py.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NORESERVE = 0x4000


def allocate(size):
    """Address of fresh zero pages; only those that are touched take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap failed")
    return address


def forbid(address, size):
    """Make whole pages unreadable."""
    assert address % PAGE == 0 and size % PAGE == 0
    if _libc.mprotect(address, size, 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")


def at(address, count, dtype):
    """The memory at an address as a tensor of `count` elements."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def fenced(values, side):
    """Copy of a tensor whose last (or first) byte touches an unreadable page."""
    size = values.numel() * values.element_size()
    pages = math.ceil(max(size, 1) / PAGE) * PAGE
    address = allocate(pages + 2 * PAGE)
    forbid(address, PAGE)
    forbid(address + PAGE + pages, PAGE)
    start = address + PAGE + (pages - size if side == "end" else 0)
    if values.numel() == 0:
        return values
    return at(start, values.numel(), values.dtype).view(values.shape).copy_(values)


def forbidden_rows(values, allowed):
    """Copy of ``[R, V]`` with a page-aligned row pitch; rows outside `allowed` cannot be read."""
    rows, width = values.shape
    size = values.element_size()
    pitch = math.ceil(width * size / PAGE) * PAGE
    address = allocate(rows * pitch)
    flat = at(address, rows * pitch // size, values.dtype)
    table = flat.as_strided((rows, width), (pitch // size, 1))
    for r in range(rows):
        if r in allowed:
            table[r] = values[r]
        else:
            forbid(address + r * pitch, pitch)
    return table
