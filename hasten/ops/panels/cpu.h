// Products with weight matrices in panels of 16 rows (docs/design/003-serving.md, "Weights: panels").
#pragma once

#include "../_cpu/kernels.h"

namespace hasten {

// rotated: codes of W T / 128 (rotation.py), in groups of 128.
enum class Panel : int32_t { f32 = 0, bf16 = 1, quantised = 2, rotated = 3 };

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

inline bool has_codes(const Matrix& m) {
    return m.format == Panel::quantised || m.format == Panel::rotated;
}

inline int64_t panels_of(const Matrix& m) {
    return (m.N + PANEL_ROWS - 1) / PANEL_ROWS;
}

// Weights of the group that begins at k: the last one ends with a block of 32.
inline int64_t group_size(const Matrix& m, int64_t k) {
    return m.group <= 32 || m.K - k >= m.group ? m.group : (m.K - k + 31) / 32 * 32;
}

// Bytes of 16 rows of a group of `weights`.
inline int64_t group_bytes(const Matrix& m, int64_t weights) {
    return PANEL_ROWS * (m.zero < 0 ? 4 : 2) + 2 * weights * m.bits;
}

// Bytes of a panel, 0 for a format that has no layout.
inline int64_t panel_bytes(const Matrix& m) {
    if (m.format == Panel::f32) return PANEL_ROWS * 4 * m.K;
    if (m.format == Panel::bf16) return PANEL_ROWS * 4 * ((m.K + 1) / 2);
    const bool bits = (m.bits >= 3 && m.bits <= 6) || m.bits == 8;
    const bool rotated = m.format == Panel::rotated;
    const bool groups = m.group == 128 || (!rotated && (m.group == 16 || m.group == 32 || m.group == 64));
    // A vector of the 1-bit plane holds 32 values of each row.
    if (!has_codes(m) || !bits || !groups || (m.bits < 6 && m.bits & 1 && m.group < 32)) return 0;
    const int64_t whole = m.K / m.group, rest = m.K % m.group;
    return whole * group_bytes(m, m.group) + (rest ? group_bytes(m, group_size(m, m.K - rest)) : 0);
}

// How the rows of x are prepared. Products of the same x, M and K whose forms are equal (panel_form) may
// share the prepared rows.
//   bytes                      quantised panels, in integers: int8, one scale for each 32 values; any
//                              number of rows where that is fastest (few_rows_limit in layout.h)
//   pairs, floats              few rows, bf16 or float32 panels
//   pairs_rows, floats_rows    many rows, any panels
//   rotated_...                rotated before; as bytes with one scale for each 128 values
enum class PanelForm : int32_t {
    bytes,
    pairs,
    floats,
    pairs_rows,
    floats_rows,
    rotated_bytes,
    rotated_pairs_rows,
    rotated_floats_rows
};

// Whether rows are bytes, which can be prepared and multiplied a few at a time.
inline bool is_bytes(PanelForm form) {
    return form == PanelForm::bytes || form == PanelForm::rotated_bytes;
}

}  // namespace hasten
