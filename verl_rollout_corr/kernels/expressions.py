"""Expressions of the part of Python that kernels are written in, translated into LLVM's language."""

# pyright: basic
from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, cast

import llvmlite.ir as ir

F64, I64, BOOL = ir.DoubleType(), ir.IntType(64), ir.IntType(1)
VOID = ir.VoidType()
"""Types of values, and of none."""


@dataclass(frozen=True)
class Instruction:
    """An operation that Python lacks. `generate` is given the builder and the arguments, and returns the result."""

    result: ir.Type
    arguments: tuple[ir.Type, ...]
    generate: Callable[..., Any]


@dataclass(frozen=True)
class Function:
    """A function to translate. `flags`: what LLVM may do with its floating-point arithmetic."""

    function: Any
    flags: tuple[str, ...]

    @cached_property
    def tree(self) -> ast.FunctionDef:
        """Its source."""
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body
        assert isinstance(tree, ast.FunctionDef)
        return tree

    @cached_property
    def parameters(self) -> list[str]:
        """Their names."""
        return [parameter.arg for parameter in self.tree.args.args]

    @cached_property
    def assigned(self) -> set[str]:
        """Names that the body assigns to."""
        names = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return {node.id for node in names if isinstance(node.ctx, ast.Store)}


class TranslationError(Exception):
    """A function uses something that is not in the part of Python that is translated."""


_FLOAT = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_INT = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.LShift: "shl", ast.RShift: "ashr"}
_BITS = {ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor"}
_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


class Expressions:
    """Computes expressions of one function, or of an inline function at one of its calls, with an LLVM builder."""

    def __init__(self, function: Function, builder: Any, entry: ir.Block) -> None:
        self.function, self.builder, self.entry = function, builder, entry
        self.fixed: dict[str, Any] = {}
        self.slots: dict[str, Any] = {}

    def inline(self, function: Function, arguments: list[Any]) -> Any:
        """The results of an inline function, which becomes part of this one."""
        raise NotImplementedError

    def wrong(self, node: ast.AST, what: str) -> TranslationError:
        """The error that says where something stands that cannot be translated."""
        code = self.function.function.__code__
        line = code.co_firstlineno + getattr(node, "lineno", 1) - 1
        return TranslationError(f"{code.co_filename}:{line}: {what}: {ast.unparse(node)}")

    def slot(self, kind: ir.Type, name: str) -> Any:
        """Memory for a variable; LLVM makes a register of it."""
        with self.builder.goto_block(self.entry):
            return self.builder.alloca(kind, name=name)

    def converted(self, value: Any, kind: ir.Type, what: str) -> Any:
        """The value as another type: a bool as an int, either as a float."""
        if value.type == kind:
            return value
        if kind == I64 and value.type == BOOL:
            return self.builder.zext(value, I64)
        if kind == F64 and value.type in (I64, BOOL):
            return (self.builder.sitofp if value.type == I64 else self.builder.uitofp)(value, F64)
        raise TranslationError(f"{self.function.function.__qualname__}: {what} is {kind} and cannot be {value.type}")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression."""
        handler = getattr(self, "of_" + type(node).__name__.lower(), None)
        if handler is None:
            raise self.wrong(node, "this expression is not translated")
        return handler(node)

    def truth(self, node: ast.expr) -> Any:
        """The value of a condition, which has to be a bool."""
        value = self.value(node)
        if value.type != BOOL:
            raise self.wrong(node, "a condition has to be a comparison")
        return value

    def static(self, node: ast.expr) -> Any:
        """What a name of the module, or an attribute of another module, is."""
        if isinstance(node, ast.Attribute):
            owner = self.static(node.value)
            if not isinstance(owner, ModuleType):
                raise self.wrong(node, "only a module's attributes are read")
            return getattr(owner, node.attr)
        names = self.function.function.__globals__
        if isinstance(node, ast.Name) and (node.id in names or hasattr(builtins, node.id)):
            return names[node.id] if node.id in names else getattr(builtins, node.id)
        raise self.wrong(node, "this name has no value")

    def constant(self, node: ast.expr, value: Any) -> Any:
        """A number of Python as a constant."""
        for kind, of in ((bool, BOOL), (int, I64), (float, F64)):
            if isinstance(value, kind):
                return ir.Constant(of, value)
        raise self.wrong(node, "only numbers are constants")

    def of_constant(self, node: ast.Constant) -> Any:
        """A number."""
        return self.constant(node, node.value)

    def of_attribute(self, node: ast.Attribute) -> Any:
        """A constant of another module."""
        return self.constant(node, self.static(node))

    def of_name(self, node: ast.Name) -> Any:
        """A variable, a parameter, or a constant of the module."""
        if node.id in self.slots:
            return self.builder.load(self.slots[node.id])
        return self.fixed[node.id] if node.id in self.fixed else self.constant(node, self.static(node))

    def of_subscript(self, node: ast.Subscript) -> Any:
        """One of several results of a call."""
        value = self.value(node.value)
        if not (isinstance(value, tuple) and isinstance(node.slice, ast.Constant)):
            raise self.wrong(node, "only the results of a function are numbered")
        return value[cast(int, node.slice.value)]

    def of_unaryop(self, node: ast.UnaryOp) -> Any:
        """`-x` and `not x`."""
        if isinstance(node.op, ast.Not):
            value = self.truth(node.operand)
            return ir.Constant(BOOL, not value.constant) if isinstance(value, ir.Constant) else self.builder.not_(value)
        value = self.value(node.operand)
        if not isinstance(node.op, ast.USub):
            raise self.wrong(node, "this operator is not translated")
        return self.builder.fneg(value, flags=self.function.flags) if value.type == F64 else self.builder.neg(value)

    def of_binop(self, node: ast.BinOp) -> Any:
        """Arithmetic."""
        return self.operation(node, node.op, self.value(node.left), self.value(node.right))

    def operation(self, node: ast.AST, operator: ast.operator, one: Any, other: Any) -> Any:
        """Of bools, ints and floats the wider; bools are added as ints, and `/` is of floats."""
        kind = type(operator)
        if kind in _BITS and one.type == other.type == BOOL:
            return getattr(self.builder, _BITS[kind])(one, other)
        real = F64 in (one.type, other.type) or kind is ast.Div
        one, other = (self.converted(side, F64 if real else I64, "an operand") for side in (one, other))
        name = _FLOAT.get(kind) if real else {**_INT, **_BITS}.get(kind)
        if name is None:
            raise self.wrong(node, "this operator is not translated")
        return getattr(self.builder, name)(one, other, **({"flags": self.function.flags} if real else {}))

    def of_compare(self, node: ast.Compare) -> Any:
        """One comparison; with NaN only `!=` is true."""
        if len(node.ops) > 1:
            raise self.wrong(node, "comparisons are not chained")
        return self.compared(_COMPARED[type(node.ops[0])], self.value(node.left), self.value(node.comparators[0]))

    def compared(self, sign: str, one: Any, other: Any) -> Any:
        """The comparison of two numbers."""
        kind = F64 if F64 in (one.type, other.type) else I64
        one, other = (self.converted(side, kind, "a side of a comparison") for side in (one, other))
        if kind == I64:
            return self.builder.icmp_signed(sign, one, other)
        compare = self.builder.fcmp_unordered if sign == "!=" else self.builder.fcmp_ordered
        return compare(sign, one, other, flags=self.function.flags)

    def of_boolop(self, node: ast.BoolOp) -> Any:
        """`and` and `or`: what stands behind is computed only if it matters."""
        result, behind = self.slot(BOOL, "condition"), self.builder.append_basic_block("decided")
        for part in node.values:
            value = self.truth(part)
            self.builder.store(value, result)
            if part is not node.values[-1]:
                onward = self.builder.append_basic_block("undecided")
                both = (onward, behind) if isinstance(node.op, ast.And) else (behind, onward)
                self.builder.cbranch(value, *both)
                self.builder.position_at_end(onward)
        self.builder.branch(behind)
        self.builder.position_at_end(behind)
        return self.builder.load(result)

    def of_ifexp(self, node: ast.IfExp) -> Any:
        """Both sides, of which one is chosen; only one if the condition is a constant."""
        condition = self.truth(node.test)
        if isinstance(condition, ir.Constant):
            return self.value(node.body if condition.constant else node.orelse)
        return self.chosen(condition, self.value(node.body), self.value(node.orelse))

    def chosen(self, condition: Any, yes: Any, no: Any) -> Any:
        """One of two numbers, as the wider of their types."""
        kind = next(kind for kind in (F64, I64, BOOL) if kind in (yes.type, no.type))
        return self.builder.select(condition, *(self.converted(side, kind, "one of two") for side in (yes, no)))

    def of_call(self, node: ast.Call) -> Any:
        """An instruction, an inline function, a builtin, or a function of constants."""
        called, arguments = self.static(node.func), [self.value(argument) for argument in node.args]
        if isinstance(called, Instruction):
            kinds = zip(arguments, called.arguments, strict=True)
            return called.generate(self.builder, *(self.converted(value, kind, "an argument") for value, kind in kinds))
        if isinstance(called, Function):
            return self.inline(called, arguments)
        if called is float:
            return self.converted(arguments[0], F64, "a float")
        if called is abs:
            return self.absolute(arguments[0])
        if called in (min, max):
            one, other = arguments
            return self.chosen(self.compared("<" if called is min else ">", other, one), other, one)
        if callable(called) and all(isinstance(argument, ir.Constant) for argument in arguments):
            return self.constant(node, called(*(argument.constant for argument in arguments)))
        raise self.wrong(node, "this function is not translated")

    def absolute(self, value: Any) -> Any:
        """The absolute value."""
        if value.type == F64:
            kind = ir.FunctionType(F64, [F64])
            function = self.builder.module.declare_intrinsic("llvm.fabs", [F64], kind)
            return self.builder.call(function, [value], fastmath=self.function.flags)
        return self.builder.select(
            self.builder.icmp_signed("<", value, ir.Constant(I64, 0)), self.builder.neg(value), value
        )
