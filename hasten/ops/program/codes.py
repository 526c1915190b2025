"""Codes of functions in a program's instructions: a name's place is its code."""

KINDS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "sigmoid", "tanh")
"""Codes of activations in instructions; -1 is none."""

FUNCTION = 32
"""Code of the first of `FUNCTIONS`, where an activation's could be."""

FUNCTIONS = (
    "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "abs", "trunc", "floor",
    "softplus",
)  # fmt: skip

BINARY = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "greater", "greater_equal", "less",
    "less_equal", "equal", "not_equal", "power",
)  # fmt: skip
"""Codes of operators of two numbers; comparisons give 1 and 0."""
