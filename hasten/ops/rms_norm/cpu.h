// The norms over rows of K elements: RMS (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), alone or
// after a residual sum.
#pragma once

#include "../_cpu/kernels.h"

namespace hasten {

struct Norm {
    int64_t N, K;
    bool layer;                      // subtracts the mean
    int64_t rows;                    // rows of an item
    const float *multiplier, *bias;  // [K]; bias only for layer
    float* mean;                     // [N]; only for layer
    float* rstd;                     // [N]

    // Forward: h = x + residual, y = (h - mean) * rstd * multiplier + bias.
    float eps;
    bool given;  // mean and rstd are read, not computed
    Type x_type, residual_type, h_type;
    const void *x, *residual;  // residual may be null; then h is not written
    void* h;
    // The normalised value is rounded to `inner`, the result to `middle` and then to its own type.
    Type inner, middle, y_type;
    void* y;

    // Backward, h in x: the gradient of x plus dh, written once or twice.
    Type dy_type, dh_type;
    const void *dy, *dh;  // dh may be null
    Type dx_type, dx2_type;
    void *dx, *dx2;              // either may be null
    bool sums;                   // of dy * normalised x, and of dy for layer, over the rows
    float* partial;              // [items][2][K]
    float *dmultiplier, *dbias;  // [K]
};

// Floats of a row's buffer, and of the scratch of an item.
inline int64_t norm_pad(int64_t K) {
    return (K + 15) / 16 * 16;
}
inline int64_t norm_scratch(int64_t K) {
    return 4 * norm_pad(K);
}
// Columns of an item of `norm_sum`.
constexpr int64_t NORM_COLUMNS = 256;

}  // namespace hasten
