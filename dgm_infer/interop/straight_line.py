"""A run of a program as straight-line code: the torch calls that it made, without the program around them."""

from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .leading import JOINING, SUMS, acts_on_leading, counted_from_the_first

__all__ = ["Code", "Recording", "writes"]

# Calls up to which a run is compiled, in seconds.
_MOST_CALLS = 100_000

Function = Callable[[Tensor], tuple[Tensor, ...]]


class Code(NamedTuple):
    """The calls of a run as functions of its input: plain torch code, which every transformation takes."""

    row: Function
    """Of one input, ``[D]``: a tuple of outputs."""
    rows: Function | None
    """Of many, in the last dimension of ``[D, n]`` and of the outputs; None if its calls would mix them."""


class _Call(NamedTuple):
    """One call of torch, and the tensors it made."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    made: list[Tensor]
    picks: list[int] | None
    """Where they are in a result that is a tuple; None for a tensor."""
    changed: Tensor | None
    """The tensor that it writes to."""
    fixed: Tensor | None
    """Its result, if that does not depend on the values of the inputs."""

    @property
    def parts(self) -> list[Tensor]:
        return [*self.made, *([] if self.changed is None else [self.changed])]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


class Recording(TorchFunctionMode):
    """While active, notes every torch call that an input takes part in; :meth:`code` repeats them.

    What does not depend on the inputs becomes a constant, as do shapes and whatever Python computes. Calls that torch
    does not show to a mode (``torch.func``, an ``autograd.Function``) are missed: the result is then another function,
    so whoever records must compare the two.

    Args:
        u: the input of the run, ``[D]``.
    """

    def __init__(self, u: Tensor):
        super().__init__()
        self._u = u
        self._calls: list[_Call] = []
        # by identity; the tensors are held, so that no other takes theirs
        self._known: dict[int, Tensor] = {id(u): u}
        # memory of values that do not depend on the input, only their being one per chain does
        self._fixed: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = [self._known[id(leaf)] for leaf in _leaves((args, kwargs)) if id(leaf) in self._known]
        if not known:
            return result
        changed = args[0] if writes(func) and args and isinstance(args[0], Tensor) else None
        made, picks = _made(result)
        if not made and changed is None:
            return result
        is_fixed = func in _FIXED or all(_memory(tensor) in self._fixed for tensor in known)
        if is_fixed:
            self._fixed.update(map(_memory, made))
        elif changed is not None:
            self._fixed.discard(_memory(changed))
        # what is fixed may be written to later, as may lists of the program
        value = made[0].clone() if is_fixed and made else None
        self._calls.append(_Call(func, _copied(args), _copied(kwargs), made, picks, changed, value))
        self._known.update({id(part): part for part in self._calls[-1].parts})
        return result

    def code(self, outputs: Sequence[Tensor]) -> Code:
        """The calls that these tensors of the run need, as functions of the input.

        Raises:
            ValueError: there are too many to compile.
        """
        if len(self._calls) > _MOST_CALLS:
            raise ValueError(f"{len(self._calls)} calls")
        written = {_memory(call.changed) for call in self._calls if call.changed is not None}
        written -= self._filled(written)
        writer = _Writer(self._u, written)
        for call in self._needed(outputs, written):
            writer.write(call)
        return writer.code(outputs)

    def _filled(self, written: set[int]) -> set[int]:
        """Memory that is new when a call fills it and that nothing else writes to: it only renames what it is given."""
        calls: dict[int, list[_Call]] = {}
        for call in self._calls:
            for memory in {_memory(part) for part in call.parts}:
                calls.setdefault(memory, []).append(call)

        def is_filled(of_it: list[_Call]) -> bool:
            once = sum(call.changed is not None for call in of_it) == 1
            return once and len(of_it) > 1 and _fills(*of_it[:2]) and _memory(of_it[1].args[1]) not in written

        return {memory for memory in written if is_filled(calls[memory])}

    def _needed(self, outputs: Sequence[Tensor], written: set[int]) -> list[_Call]:
        """The calls that the outputs depend on, in order: also writes to memory that is read later."""
        memory = {_memory(output) for output in outputs}
        needed = []
        for call in reversed(self._calls):
            if not any(_memory(part) in memory for part in call.parts):
                continue
            # what is fixed, and stays so, is a constant
            if call.fixed is not None and not any(_memory(part) in written for part in call.parts):
                continue
            needed.append(call)
            memory.update(map(_memory, call.tensors))
        return needed[::-1]


class _Writer:
    """Writes calls as the source of a function.

    Args:
        u: its argument.
        written: memory that the run changes in place.
    """

    def __init__(self, u: Tensor, written: set[int]):
        self._written = written
        self._names: dict[int, str] = {id(u): "u"}
        self._aliases: dict[int, Tensor] = {}
        self._constant_names: dict[int, str] = {}
        self._constants: dict[str, Any] = {"own": _own}
        # each with the variables that it uses or makes
        self._lines: list[tuple[str, list[str]]] = []
        self._acts_on_leading = True

    def write(self, call: _Call) -> None:
        unchanged = self._unchanged(call)
        if unchanged is not None:
            pairs = zip(call.made, unchanged, strict=True)
            self._aliases.update({id(new): old for new, old in pairs if new is not old})
            return
        if call.fixed is not None and call.changed is None and not _shares_memory(call):
            # memory that is written to: each chain has its own
            name = self._named(call.made[0])
            self._lines.append((f"{name} = own({self._constant(call.fixed)}, u)", [name]))
            return
        if call.func in _RESHAPES and self._reshape(call):
            return
        express = self._owned if call.func in JOINING else self._expression
        ndim = max((x.ndim for x in call.made if call.func in JOINING), default=call.tensors[0].ndim)
        given, named = counted_from_the_first(call.func, call.args, call.kwargs, ndim)
        args = [express(value) for value in given]
        args += [
            f"**{{{name!r}: {express(value)}}}" if iskeyword(name) else f"{name}={express(value)}"
            for name, value in named.items()
        ]
        made = [self._named(tensor) for tensor in call.made]
        line = f"{self._constant(call.func)}({', '.join(args)})"
        if call.picks is not None:
            line = "; ".join(
                [f"r = {line}", *(f"{v} = r[{i}]" for v, i in zip(made, call.picks, strict=True)), "del r"]
            )
        elif made:
            line = f"{made[0]} = {line}"
        used = [name for tensor in call.tensors if (name := self._name(tensor))]
        self._lines.append((line, made + used))
        self._acts_on_leading &= acts_on_leading(call.func, given, named)

    def _reshape(self, call: _Call) -> bool:
        """Write a call that changes shapes for any number of rows, if nobody writes to its memory."""
        if _memory(call.made[0]) in self._written:
            return False
        before = list(call.args) if call.func is torch.broadcast_tensors else [call.args[0]]
        for x, made in zip(before, call.made, strict=True):
            old, new = self._owned(x), self._named(made)
            method = "reshape" if made.numel() == x.numel() else "expand"
            line = f"{new} = {old}.{method}({self._constant(made.shape)} + u.shape[1:])"
            self._lines.append((line, [name for name in (self._name(x), new) if name]))
        return True

    def code(self, outputs: Sequence[Tensor]) -> Code:
        values = [self._owned(output) for output in outputs]
        body = [f"return ({', '.join(values)}{',' if values else ''})"]
        later = {"u", *filter(None, map(self._name, outputs))}
        for line, variables in reversed(self._lines):
            # memory is freed where the program would have freed it
            dead = sorted(set(variables) - later)
            body.append(f"{line}; del {', '.join(dead)}" if dead else line)
            later.update(variables)
        compiled = compile("\n    ".join(["def run(u):", *reversed(body)]), "<recorded run>", "exec")
        # a constant of several numbers has no rows
        wide = {name: c.unsqueeze(-1) if _is_vector(c) else c for name, c in self._constants.items()}
        return Code(_run(compiled, self._constants), _run(compiled, wide) if self._acts_on_leading else None)

    def _unchanged(self, call: _Call) -> list[Tensor] | None:
        """What a product with 1, a sum with 0 or a change to the same shape leaves as it is; None for other calls."""
        if any(_memory(tensor) in self._written for tensor in [*call.made, *call.tensors]):
            return None
        is_scalar_sum = call.func in SUMS and call.args[0].ndim == 0
        if call.func in _RESHAPES or call.func is Tensor.to or is_scalar_sum:
            before = list(call.args) if call.func is torch.broadcast_tensors else [call.args[0]]
            same = len(before) == len(call.made) and all(map(_alike, before, call.made))
            return before if same else None
        if call.func is Tensor.copy_:
            return [call.args[1]]
        neutral = _NEUTRAL.get(call.func)
        if neutral is None or len(call.args) != 2 or call.kwargs:
            return None
        for x, other in (call.args, call.args[::-1])[: 1 if call.func in _LEFT_NEUTRAL else 2]:
            if _alike(x, call.made[0]) and self._name(x) and not self._name(other) and _is_number(other, neutral):
                return [x]
        return None

    def _named(self, tensor: Tensor) -> str:
        return self._names.setdefault(id(tensor), f"v{len(self._names)}")

    def _name(self, value: Any) -> str | None:
        while id(value) in self._aliases:
            value = self._aliases[id(value)]
        return self._names.get(id(value))

    def _constant(self, value: Any) -> str:
        while id(value) in self._aliases:
            value = self._aliases[id(value)]
        name = self._constant_names.setdefault(id(value), f"c{len(self._constant_names)}")
        self._constants[name] = value
        return name

    def _expression(self, value: Any, constant: Callable[[Any], str] | None = None) -> str:
        name = self._name(value)
        if name is not None:
            return name
        if not any(self._name(leaf) for leaf in _leaves(value)):
            return (constant or self._constant)(value)
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._expression, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._expression(each, constant)}" for key, each in value.items()) + "}"
        inner = ", ".join(self._expression(each, constant) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"

    def _owned(self, value: Any) -> str:
        """As an expression whose constants have a value per row, beside variables that do."""

        def own(value: Any) -> str:
            return f"own({self._constant(value)}, u)" if isinstance(value, Tensor) else self._constant(value)

        return self._expression(value, own)


def _own(constant: Tensor, u: Tensor) -> Tensor:
    return constant + u.new_zeros(u.shape[1:], dtype=constant.dtype)


def _run(compiled: Any, constants: dict[str, Any]) -> Function:
    names = dict(constants)
    exec(compiled, names)
    return names["run"]


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _alike(x: Any, made: Tensor) -> bool:
    return isinstance(x, Tensor) and (x.shape, x.dtype, x.device) == (made.shape, made.dtype, made.device)


def _shares_memory(call: _Call) -> bool:
    return _memory(call.made[0]) in map(_memory, call.tensors)


def _fills(made: _Call, filled: _Call) -> bool:
    """Whether the second call gives all values to the new tensor of the first."""
    if made.fixed is None or made.changed is not None or _shares_memory(made) or filled.func is not Tensor.copy_:
        return False
    new, source = filled.args[:2]
    whole = new.numel() * new.element_size() == new.untyped_storage().nbytes()
    return whole and new is made.made[0] and _alike(source, new)


def _is_number(value: Any, number: float) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and bool((value == number).all())
    return isinstance(value, int | float) and value == number


_FIXED = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new, Tensor.new_tensor}
_FIXED |= {torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
_RESHAPES = {torch.broadcast_tensors, Tensor.expand, Tensor.expand_as, torch.reshape, Tensor.reshape, Tensor.view}
_RESHAPES |= {torch.unsqueeze, Tensor.unsqueeze, torch.squeeze, Tensor.squeeze, torch.flatten, Tensor.flatten}
_RESHAPES |= {Tensor.contiguous, Tensor.ravel, torch.ravel}
_NEUTRAL: dict[Any, float] = dict.fromkeys([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__], 1.0)
_LEFT_NEUTRAL: dict[Any, float] = dict.fromkeys([torch.div, Tensor.div, Tensor.__truediv__], 1.0)
_LEFT_NEUTRAL |= dict.fromkeys([torch.sub, Tensor.sub, Tensor.__sub__], 0.0)
_NEUTRAL |= _LEFT_NEUTRAL
_NEUTRAL |= dict.fromkeys([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__], 0.0)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, slice):
        return _leaves((tree.start, tree.stop, tree.step))
    if isinstance(tree, tuple | list):
        return [leaf for each in tree for leaf in _leaves(each)]
    if isinstance(tree, dict):
        return _leaves(list(tree.values()))
    return [tree]


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(value) for value in tree]
    return tuple(_copied(value) for value in tree) if type(tree) is tuple else tree


def _made(result: Any) -> tuple[list[Tensor], list[int] | None]:
    if isinstance(result, Tensor):
        return [result], None
    if isinstance(result, tuple | list):
        picks = [i for i, each in enumerate(result) if isinstance(each, Tensor)]
        return [result[i] for i in picks], picks
    return [], None


def _memory(tensor: Tensor) -> int:
    """Tensors that share memory have the same number."""
    return tensor.untyped_storage()._cdata


def writes(func: Callable[..., Any]) -> bool:
    """Whether a call changes its first argument in place."""
    name = func.__name__
    if name.startswith("__"):
        return name in _WRITES
    return name.endswith("_")


_WRITES = {"__setitem__", "__set__"}
_WRITES |= {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}
_WRITES |= {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
