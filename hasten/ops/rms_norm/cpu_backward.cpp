// Norms, backward. With n = (h - mean) * rstd and g = multiplier * dy:
//
//     dx = rstd * (g - [mean of g] - n * (mean of g * n)) + dh,    the bracket only for the layer norm
//
// The sums over rows are taken for fixed blocks of rows and then added in order: the threads do not matter.
#include <algorithm>

#include "../_cpu/rows.h"
#include "cpu.h"

namespace hasten {
namespace {

// What the two sums of a row need; `dm` and `db` collect the sums over rows.
template <bool LAYER, bool SUMS>
inline void row_sums(const Norm& a, const float* h, const float* dy, float mean, float rstd, float* dm,
                     float* db, float* total_g, float* total_gn) {
    VF sum_g{}, sum_gn[2] = {};
    const float* multiplier = a.multiplier;
    const int64_t K = a.K;
    auto step = [&](int64_t i, auto lanes, VF& gn) {
        const VF d = get(dy + i, lanes);
        const VF n = LAYER ? keep((get(h + i, lanes) - mean) * rstd, lanes) : get(h + i, lanes) * rstd;
        const VF g = d * get(multiplier + i, lanes);
        gn = gn + g * n;
        if (LAYER) sum_g = sum_g + g;
        if (SUMS) put(dm + i, get(dm + i, lanes) + d * n, lanes);
        if (SUMS && LAYER) put(db + i, get(db + i, lanes) + d, lanes);
    };
    int64_t i = 0;
    for (; i + 2 * W <= K; i += 2 * W) {
        step(i, Full{}, sum_gn[0]);
        step(i + W, Full{}, sum_gn[1]);
    }
    for (; i + W <= K; i += W) step(i, Full{}, sum_gn[0]);
    if (i < K) step(i, int(K - i), sum_gn[1]);
    *total_g = sum(sum_g);
    *total_gn = sum(sum_gn[0] + sum_gn[1]);
}

// With dh the bits are those of the gradient alone, rounded, plus dh: as autograd adds the two.
template <bool LAYER, bool ADD>
inline void row_gradient(const Norm& a, const float* h, const float* dy, const float* dh, float mean,
                         float rstd, float mean_g, float mean_gn, float* dx) {
    const float* multiplier = a.multiplier;
    each_vector(a.K, [&](int64_t i, auto lanes) {
        const VF n = LAYER ? (get(h + i, lanes) - mean) * rstd : get(h + i, lanes) * rstd;
        VF g = get(dy + i, lanes) * get(multiplier + i, lanes) - n * mean_gn;
        if (LAYER) g = g - mean_g;
        put(dx + i, ADD ? apart(g * rstd) + get(dh + i, lanes) : g * rstd, lanes);
    });
}

template <bool LAYER, bool SUMS>
void backward_rows(const Norm& a, int64_t item, float* scratch) {
    const int64_t K = a.K, last = std::min(a.N, (item + 1) * a.rows), pad = norm_pad(K);
    float *dm = nullptr, *db = nullptr;
    if (SUMS) {
        dm = a.partial + item * 2 * K, db = dm + K;
        std::memset(dm, 0, size_t(LAYER ? 2 * K : K) * sizeof(float));
    }
    for (int64_t r = item * a.rows; r < last; r++) {
        const float* h = as_floats(a.x_type, at(a.x_type, a.x, r * K), K, scratch);
        const float* dy = as_floats(a.dy_type, at(a.dy_type, a.dy, r * K), K, scratch + pad);
        const float mean = LAYER ? a.mean[r] : 0, rstd = a.rstd[r];
        float total_g, total_gn;
        row_sums<LAYER, SUMS>(a, h, dy, mean, rstd, dm, db, &total_g, &total_gn);
        if (!a.dx) continue;
        const float mean_g = total_g / float(K), mean_gn = total_gn / float(K);
        float* dx = a.dx_type == Type::f32 ? (float*)a.dx + r * K : scratch + 2 * pad;
        if (a.dh) {
            const float* dh = as_floats(a.dh_type, at(a.dh_type, a.dh, r * K), K, scratch + 3 * pad);
            row_gradient<LAYER, true>(a, h, dy, dh, mean, rstd, mean_g, mean_gn, dx);
        } else {
            row_gradient<LAYER, false>(a, h, dy, nullptr, mean, rstd, mean_g, mean_gn, dx);
        }
        if (a.dx_type != Type::f32) write_floats(a.dx_type, at(a.dx_type, a.dx, r * K), dx, K);
        if (a.dx2) write_floats(a.dx2_type, at(a.dx2_type, a.dx2, r * K), dx, K);
    }
}

void backward(const Norm& a, int64_t item, float* scratch) {
    if (a.layer)
        a.sums ? backward_rows<true, true>(a, item, scratch) : backward_rows<true, false>(a, item, scratch);
    else
        a.sums ? backward_rows<false, true>(a, item, scratch) : backward_rows<false, false>(a, item, scratch);
}

// The sums over the items' rows, in order and in double, for a block of columns.
void sum_partials(const Norm& a, int64_t item) {
    const int64_t first = item * NORM_COLUMNS, count = std::min(a.K, first + NORM_COLUMNS) - first;
    const int64_t items = (a.N + a.rows - 1) / a.rows;
    for (int part = 0; part < (a.layer ? 2 : 1); part++) {
        double total[NORM_COLUMNS] = {};
        for (int64_t k = 0; k < items; k++) {
            const float* from = a.partial + (2 * k + part) * a.K + first;
            for (int64_t i = 0; i < count; i++) total[i] += double(from[i]);
        }
        float* to = (part ? a.dbias : a.dmultiplier) + first;
        for (int64_t i = 0; i < count; i++) to[i] = float(total[i]);
    }
}

}  // namespace

void norm_backward_kernels(Kernels& table) {
    table.norm_backward = backward;
    table.norm_sum = sum_partials;
}

}  // namespace hasten
