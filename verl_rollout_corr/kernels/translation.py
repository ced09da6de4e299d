"""Translates functions of a small part of Python into LLVM's language, which llvmlite then compiles.

numba does that for nearly all of Python, and took 5.5 s for the kernels of one configuration that take 0.6 s this way,
nearly all of it LLVM's. What kernels need is little:

- values: int64, float64 and bool. A variable has the type of its first assignment; an int may become a float in an
  expression or an argument, a bool an int or a float, and nothing else changes its type.
- expressions: constants of the module or of another one, arithmetic, comparisons, `and`, `or`, `not`, conditional
  expressions (both sides are computed), `abs`, `min`, `max`, `float`, instructions, and inline functions.
- statements: assignments, also of tuples to names; `if`, `while`, `for` over a `range`, `break`, `continue`, `return`.

Inline functions become part of their callers. An `if` whose condition is a constant there leaves only one side.
"""

# pyright: basic
from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir

from verl_rollout_corr.kernels.expressions import I64, VOID, Expressions, Function


def module_of(name: str, function: Function) -> ir.Module:
    """A module with one function of int64 parameters that returns nothing."""
    module = ir.Module(name)
    kind = ir.FunctionType(VOID, [I64] * len(function.parameters))
    built: Any = ir.Function(module, kind, name)
    entry = built.append_basic_block("entry")
    builder = ir.IRBuilder(built.append_basic_block("body"))
    _Body(function, builder, entry, list(built.args)).translate()
    builder.ret_void()
    with builder.goto_block(entry):
        builder.branch(built.basic_blocks[1])
    return module


class _Body(Expressions):
    """The body of a function, or of an inline function at one of its calls."""

    def __init__(self, function: Function, builder: Any, entry: ir.Block, arguments: list[Any]) -> None:
        super().__init__(function, builder, entry)
        self.results: list[Any] | None = None
        self.loops: list[tuple[ir.Block, ir.Block]] = []
        for name, value in zip(function.parameters, arguments, strict=True):
            if name in function.assigned:
                self.assign(name, value)
            else:
                self.fixed[name] = value

    def translate(self) -> Any:
        """Appends the code; returns the result, a tuple of results, or None."""
        self.exit = self.builder.append_basic_block("exit")
        self.statements(self.function.tree.body)
        self.go(self.exit)
        self.builder.position_at_end(self.exit)
        if self.results is None:
            return None
        values = [self.builder.load(slot) for slot in self.results]
        return tuple(values) if len(values) > 1 else values[0]

    def inline(self, function: Function, arguments: list[Any]) -> Any:
        """Translates it anew at each call, so that constants among the arguments reach its conditions."""
        return _Body(function, self.builder, self.entry, arguments).translate()

    def go(self, block: ir.Block) -> None:
        """Continues in a block, unless what was last translated has left already."""
        if not self.builder.block.is_terminated:
            self.builder.branch(block)

    def assign(self, name: str, value: Any) -> None:
        """Gives a variable a value."""
        if name not in self.slots:
            self.slots[name] = self.slot(value.type, name)
        self.builder.store(self.converted(value, self.slots[name].type.pointee, name), self.slots[name])

    def statements(self, nodes: list[ast.stmt]) -> None:
        """One after the other, up to one that leaves."""
        for node in nodes:
            if self.builder.block.is_terminated:
                return
            handler = getattr(self, "on_" + type(node).__name__.lower(), None)
            if handler is None:
                raise self.wrong(node, "this statement is not translated")
            handler(node)

    def on_expr(self, node: ast.Expr) -> None:
        """A call, or a docstring."""
        if isinstance(node.value, ast.Call):
            self.value(node.value)
        elif not isinstance(node.value, ast.Constant):
            raise self.wrong(node, "a statement without an effect")

    def on_assign(self, node: ast.Assign) -> None:
        """Assigns to a name, or to several from a tuple or from a function with several results."""
        (target,) = node.targets
        if isinstance(target, ast.Name):
            self.assign(target.id, self.value(node.value))
            return
        if not isinstance(target, ast.Tuple):
            raise self.wrong(node, "only names are assigned to")
        for name, value in zip(target.elts, self.several(node.value), strict=True):
            assert isinstance(name, ast.Name)
            self.assign(name.id, value)

    def several(self, node: ast.expr) -> Sequence[Any]:
        """The values of a tuple, or of a call with several results; else a single one."""
        if isinstance(node, ast.Tuple):
            return [self.value(part) for part in node.elts]
        value = self.value(node)
        return value if isinstance(value, tuple) else (value,)

    def on_augassign(self, node: ast.AugAssign) -> None:
        """`x += y`."""
        assert isinstance(node.target, ast.Name)
        value = self.builder.load(self.slots[node.target.id])
        self.assign(node.target.id, self.operation(node, node.op, value, self.value(node.value)))

    def on_if(self, node: ast.If) -> None:
        """Both sides, or the one that a constant condition chooses."""
        condition = self.truth(node.test)
        if isinstance(condition, ir.Constant):
            self.statements(node.body if condition.constant else node.orelse)
            return
        yes, no, behind = (self.builder.append_basic_block(name) for name in ("then", "else", "behind"))
        self.builder.cbranch(condition, yes, no)
        for block, body in ((yes, node.body), (no, node.orelse)):
            self.builder.position_at_end(block)
            self.statements(body)
            self.go(behind)
        self.builder.position_at_end(behind)

    def on_while(self, node: ast.While) -> None:
        """Looks at the condition before each turn."""
        test, body, behind = (self.builder.append_basic_block(name) for name in ("test", "body", "behind"))
        self.go(test)
        self.builder.position_at_end(test)
        self.builder.cbranch(self.truth(node.test), body, behind)
        self.loop(node.body, body, test, behind)

    def on_for(self, node: ast.For) -> None:
        """Counts; the variable is only written here."""
        call, target = node.iter, node.target
        if not (isinstance(call, ast.Call) and isinstance(target, ast.Name) and ast.unparse(call.func) == "range"):
            raise self.wrong(node, "only a range is looped over")
        parts = [self.converted(self.value(part), I64, "a range's bound") for part in call.args]
        start, stop = (ir.Constant(I64, 0), parts[0]) if len(parts) == 1 else parts[:2]
        step = parts[2] if len(parts) == 3 else ir.Constant(I64, 1)
        counter = self.slot(I64, target.id)
        self.builder.store(start, counter)
        test, body, onward, behind = (self.builder.append_basic_block(n) for n in ("test", "body", "next", "behind"))
        self.go(test)
        self.builder.position_at_end(test)
        self.builder.cbranch(self.builder.icmp_signed("<", self.builder.load(counter), stop), body, behind)
        self.builder.position_at_end(body)
        self.assign(target.id, self.builder.load(counter))
        self.loop(node.body, body, onward, behind)
        self.builder.position_at_end(onward)
        self.builder.store(self.builder.add(self.builder.load(counter), step, flags=["nsw"]), counter)
        self.builder.branch(test)
        self.builder.position_at_end(behind)

    def loop(self, nodes: list[ast.stmt], body: ir.Block, onward: ir.Block, behind: ir.Block) -> None:
        """The body of a loop."""
        self.loops.append((onward, behind))
        self.builder.position_at_end(body)
        self.statements(nodes)
        self.go(onward)
        self.loops.pop()
        self.builder.position_at_end(behind)

    def on_continue(self, _: ast.Continue) -> None:
        """To the next turn."""
        self.builder.branch(self.loops[-1][0])

    def on_break(self, _: ast.Break) -> None:
        """Out of the loop."""
        self.builder.branch(self.loops[-1][1])

    def on_return(self, node: ast.Return) -> None:
        """Leaves with the results, all of one type at every `return`."""
        if node.value is not None:
            values = self.several(node.value)
            if self.results is None:
                self.results = [self.slot(value.type, "result") for value in values]
            for slot, value in zip(self.results, values, strict=True):
                self.builder.store(self.converted(value, slot.type.pointee, "a result"), slot)
        self.go(self.exit)
