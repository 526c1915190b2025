// Products with weight matrices in panels of 16 rows (docs/design/003-serving.md, "Weights: panels").
#pragma once

#include "../_cpu/kernels.h"

namespace hasten {

enum class Panel : int32_t { f32 = 0, bf16 = 1, quantised = 2 };

constexpr int64_t PANEL_ROWS = 16;
constexpr int32_t NO_ACTIVATION = -1;

// [N, K] in panels of 16 rows.
struct Matrix {
    const uint8_t* data;
    int64_t panel_bytes;
    Panel format;
    int32_t bits, group, zero;  // zero < 0: minima are stored
    float unit;
    int64_t N, K;
    const float* bias;  // [N] or null
};

// y = scale * (kind(x W^T + b) * (x Up^T + b_up)) + residual.
struct PanelProduct {
    Matrix matrix;
    const Matrix* up;  // same N and K, and the same form of prepared rows; or null: no factor
    int32_t kind;      // Kind of activation/cpu.h, or NO_ACTIVATION
    int64_t M;
    const float* x;  // strides in floats
    int64_t x_row;
    void* prepared;  // filled by panel_prepare for all rows, read by all threads
    float* y;
    int64_t y_row;
    const float* residual;  // null, or y itself
    int64_t residual_row;
    float scale;
    bool bf16, vnni;  // the processor multiplies pairs of bf16, and quads of bytes
    Brgemm brgemm;
};

inline int64_t panels_of(const Matrix& m) {
    return (m.N + PANEL_ROWS - 1) / PANEL_ROWS;
}

// Bytes of 16 rows of one group.
inline int64_t group_bytes(const Matrix& m) {
    return PANEL_ROWS * (m.zero < 0 ? 4 : 2) + 2 * int64_t(m.group) * m.bits;
}

// Bytes of a panel, 0 for a format that has no layout.
inline int64_t panel_bytes(const Matrix& m) {
    if (m.format == Panel::f32) return PANEL_ROWS * 4 * m.K;
    if (m.format == Panel::bf16) return PANEL_ROWS * 4 * ((m.K + 1) / 2);
    const bool bits = (m.bits >= 3 && m.bits <= 6) || m.bits == 8;
    const bool groups = m.group == 16 || m.group == 32 || m.group == 64 || m.group == 128;
    // A vector of the 1-bit plane holds 32 values of each row.
    if (m.format != Panel::quantised || !bits || !groups || (m.bits < 6 && m.bits & 1 && m.group < 32))
        return 0;
    return (m.K + m.group - 1) / m.group * group_bytes(m);
}

// How the rows of x are prepared. Products of the same x, M and K whose forms are equal (panel_form) may
// share the prepared rows.
//   bytes                      quantised panels, in integers: int8, one scale for each 32 values; any
//                              number of rows where that is fastest (few_rows_limit in layout.h)
//   pairs, floats              few rows, bf16 or float32 panels
//   pairs_rows, floats_rows    many rows, any panels
enum class PanelForm : int32_t { bytes, pairs, floats, pairs_rows, floats_rows };

}  // namespace hasten
