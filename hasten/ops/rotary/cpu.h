// Rotary position embedding (Su et al. 2021) of rows of D elements, of which the first R turn.
#pragma once

#include "../_cpu/kernels.h"

namespace hasten {

struct Rotary {
    int64_t B, H, S, D, R;
    bool interleaved, transposed;
    int64_t positions;  // of an item
    Type type, table_type, out_type;
    // Strides in elements; the last dim has stride 1. Tables: [B or 1, S, R].
    const void *x, *cos, *sin;
    int64_t x_b, x_h, x_s, cos_b, cos_s, sin_b, sin_s;
    void* out;
    int64_t out_b, out_h, out_s;
};

}  // namespace hasten
