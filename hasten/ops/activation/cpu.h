// Activations over rows, plain and gated, and their gradients.
#pragma once

#include "../_cpu/kernels.h"

namespace hasten {

// In the order of `CODES` in cpu.py.
enum class Kind : int32_t { silu, gelu, gelu_tanh, gelu_quick, relu, relu2, sigmoid, tanh };

struct Activation {
    Kind kind;
    Type type;                 // of every tensor
    int64_t N, K, rows, cols;  // [N, K] in items of [rows, cols]
    // Row strides in elements; the last dim has stride 1. `up` is null for a plain activation.
    const void *x, *up, *dy;
    int64_t x_n, up_n, dy_n;
    // Results are dense rows. Forward: y = kind(x) [* up]. Backward: y = kind(x) * up, or null. dx, dup, y
    // may be dy itself.
    void *y, *dx, *dup;
};

}  // namespace hasten
