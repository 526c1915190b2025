// Attention, backward (Dao et al. 2022, algorithm 4): the probabilities are rebuilt from the log-sum-exp. One
// item is a part of the keys of one KV head: it finishes dK and dV of its keys and leaves its share of dQ in
// a buffer of its own; the shares are added in order afterwards, so the result does not depend on timing.
#include "cpu.h"

namespace hasten {
namespace {

// Rows m and m + 1 as pairs, or row m alone where a unit is a float.
template <class Unit>
HASTEN_PAIRS_TARGET inline void store_pair(uint32_t* to, VF low, VF high) {
    if constexpr (Unit::per_unit == 1) {
        store((float*)to, low);
    } else {
        const VU both = __builtin_convertvector(narrow_fast(low), VU) |
                        (__builtin_convertvector(narrow_fast(high), VU) << 16);
        std::memcpy(to, &both, sizeof both);
    }
}

// P and dS of W columns of one row; zero where the row does not see.
struct Gradients {
    VF p, ds;
};

struct RowGradient {
    Row row;
    float lse, delta, slope, shift;
    int64_t first, last;  // columns in whole vectors

    RowGradient(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k0, int64_t n)
        : row(a, b, h, i, k0, n) {
        const int64_t at = (b * a.Hq + h) * a.Sq + i;
        lse = a.lse[at];
        delta = a.delta[at];
        slope = a.scale * LOG2E;
        shift = -lse * LOG2E;
        if (lse == -INF) row.end = row.begin = 0;
        first = row.begin < row.end ? row.begin / W * W : n;
        last = row.begin < row.end ? round_up(row.end, W) : n;
    }

    inline Gradients at(VF product, VF dp, int64_t c, int64_t n_bias, VI lane) const {
        if (c < first || c >= last) return {VF{}, VF{}};
        VF capped{};
        VF p;
        if (row.plain)
            p = exp2_of(product * slope + shift);
        else
            p = exp2_of((row.score(product, c, n_bias, lane, &capped) - lse) * LOG2E);
        if (c < row.begin || c + W > row.end) {
            const VI place = lane + int32_t(c);
            p = ((place >= int32_t(row.begin)) & (place < int32_t(row.end))) ? p : VF{};
        }
        VF ds = p * (dp - delta);  // the scale is applied to the sums dQ and dK
        if (row.softcap > 0) ds = ds * (1.0f - capped * capped);
        return {p, ds};
    }
};

template <class T>
inline void store_gradient(T* to, const float* from, int64_t n, float scale) {
    each_vector(n, [&](int64_t d, auto lanes) { put(to + d, load(from + d) * scale, lanes); });
}

template <class T, class Unit>
HASTEN_PAIRS_TARGET void backward(const Attention& a, int64_t item, void* memory) {
    const Layout l(a, true);
    const int64_t part = item % a.parts, head = item / a.parts, b = head / a.Hkv, hk = head % a.Hkv;
    const uint32_t* packed = a.packed + head * a.packed_stride;
    float* dq = a.dq_parts + item * l.blocks * l.block_rows * l.d_pad;
    const int64_t share = round_up(ceil_div(a.Sk, a.parts), 64);
    const int64_t part_begin = std::min(a.Sk, part * share), part_end = std::min(a.Sk, (part + 1) * share);

    Scratch scratch(memory);
    float* s = scratch.take<float>(l.block_rows * a.cols);
    float* dp = scratch.take<float>(l.block_rows * a.cols);
    uint32_t* p_pairs = scratch.take<uint32_t>(l.block_rows * a.cols);
    uint32_t* ds_pairs = scratch.take<uint32_t>(l.block_rows * a.cols);
    uint32_t* ds_rows = scratch.take<uint32_t>(l.block_rows * a.cols);
    float* dk = scratch.take<float>(a.cols * l.d_pad);
    float* dv = scratch.take<float>(a.cols * l.dv_pad);
    const Gemm<Unit> product{a.brgemm, scratch.take<uint32_t>(a.cols * l.block_rows)};
    const VI lane = lane_numbers();
    std::memset(dq, 0, size_t(l.blocks * l.block_rows * l.d_pad) * 4);

    for (int64_t k0 = part_begin; k0 < part_end; k0 += a.cols) {
        const int64_t keys = std::min(a.cols, part_end - k0), n_full = round_up(keys, 32);
        std::memset(dk, 0, size_t(n_full * l.d_pad) * 4);
        std::memset(dv, 0, size_t(n_full * l.dv_pad) * 4);
        for (int64_t index = 0; index < l.blocks; index++) {
            const int64_t q0 = index * a.rows, count = std::min(a.Sq, q0 + a.rows) - q0, M = l.group * count;
            // The columns that any row of the block sees, in whole groups of 32.
            int64_t from = keys, to = 0;
            for (int64_t i = q0; i < q0 + count; i++) {
                const int32_t* bound = a.bounds + b * a.bounds_b + 2 * i;
                const int64_t begin = std::max<int64_t>(bound[0] - k0, 0),
                              end = std::min<int64_t>(bound[1] - k0, keys);
                if (begin >= end) continue;
                from = std::min(from, begin);
                to = std::max(to, end);
            }
            if (from >= to) continue;
            from = from / 32 * 32;
            const int64_t n = round_up(to, 32) - from, at = k0 + from, n_bias = std::min(n, a.Sk - at);
            const int64_t pairs = ceil_div(M, l.per_unit);
            const uint32_t* q_rows = packed + l.q_rows + index * l.block_rows * l.d_units;
            const uint32_t* do_rows = packed + l.do_rows + index * l.block_rows * l.dv_units;
            const uint32_t* q_pairs = packed + l.q_pairs + index * (l.block_rows / l.per_unit) * l.d_pad;
            const uint32_t* do_pairs = packed + l.do_pairs + index * (l.block_rows / l.per_unit) * l.dv_pad;
            product(M, n, l.d_units, q_rows, l.d_units, packed + l.keys_T + at, l.keys, s, a.cols, false);
            product(M, n, l.dv_units, do_rows, l.dv_units, packed + l.values_T + at, l.keys, dp, a.cols,
                    false);
            for (int64_t u = 0; u < pairs; u++) {
                const int64_t m = u * Unit::per_unit;
                const RowGradient row(a, b, hk * l.group + m / count, q0 + m % count, at, n);
                uint32_t* ds_row = ds_rows + m * a.cols / Unit::per_unit;
                if constexpr (Unit::per_unit == 1) {
                    for (int64_t c = 0; c < n; c += W) {
                        const Gradients g =
                            row.at(load(s + m * a.cols + c), load(dp + m * a.cols + c), c, n_bias, lane);
                        store((float*)p_pairs + u * a.cols + c, g.p);
                        store((float*)ds_row + c, g.ds);
                    }
                } else {
                    const bool two = m + 1 < M;
                    const int64_t other = two ? m + 1 : m;
                    const RowGradient next(a, b, hk * l.group + other / count, q0 + other % count, at, n);
                    for (int64_t c = 0; c < n; c += W) {
                        const Gradients g =
                            row.at(load(s + m * a.cols + c), load(dp + m * a.cols + c), c, n_bias, lane);
                        Gradients h{VF{}, VF{}};
                        if (two)
                            h = next.at(load(s + other * a.cols + c), load(dp + other * a.cols + c), c,
                                        n_bias, lane);
                        store_pair<Unit>(p_pairs + u * a.cols + c, g.p, h.p);
                        store_pair<Unit>(ds_pairs + u * a.cols + c, g.ds, h.ds);
                        store_half((uint16_t*)ds_row + c, narrow_fast(g.ds));
                        if (two)
                            store_half((uint16_t*)(ds_row + a.cols / Unit::per_unit) + c, narrow_fast(h.ds));
                    }
                }
            }
            const uint32_t* ds_left = Unit::per_unit == 1 ? ds_rows : ds_pairs;
            product.left_transposed(n, l.dv_pad, pairs, p_pairs, a.cols, do_pairs, l.dv_pad,
                                    dv + from * l.dv_pad, l.dv_pad, true);
            product.left_transposed(n, l.d_pad, pairs, ds_left, a.cols, q_pairs, l.d_pad, dk + from * l.d_pad,
                                    l.d_pad, true);
            product(M, l.d_pad, n / l.per_unit, ds_rows, a.cols / l.per_unit,
                    packed + l.keys_pairs + at / l.per_unit * l.d_pad, l.d_pad,
                    dq + index * l.block_rows * l.d_pad, l.d_pad, true);
        }
        for (int64_t j = 0; j < keys; j++) {
            store_gradient((T*)a.dk + b * a.dk_b + hk * a.dk_h + (k0 + j) * a.dk_s, dk + j * l.d_pad, a.D,
                           a.scale);
            store_gradient((T*)a.dv + b * a.dv_b + hk * a.dv_h + (k0 + j) * a.dv_s, dv + j * l.dv_pad, a.Dv,
                           1);
        }
    }
}

template <class T>
void add_dq(const Attention& a, int64_t item) {
    const Layout l(a, true);
    const int64_t index = item % l.blocks, head = item / l.blocks, b = head / a.Hkv, hk = head % a.Hkv;
    const int64_t q0 = index * a.rows, count = std::min(a.Sq, q0 + a.rows) - q0;
    const int64_t part_size = l.blocks * l.block_rows * l.d_pad;
    float* parts = a.dq_parts + head * a.parts * part_size + index * l.block_rows * l.d_pad;
    for (int64_t m = 0; m < l.group * count; m++) {
        float* row = parts + m * l.d_pad;
        for (int64_t part = 1; part < a.parts; part++)
            for (int64_t d = 0; d < l.d_pad; d += W)
                store(row + d, load(row + d) + load(row + part * part_size + d));
        store_gradient(
            (T*)a.dq + b * a.dq_b + (hk * l.group + m / count) * a.dq_h + (q0 + m % count) * a.dq_s, row, a.D,
            a.scale);
    }
}

void backward_any(const Attention& a, int64_t item, void* scratch) {
#if defined(__AVX512F__)
    if (a.bf16) return backward<bf16, PairBF16>(a, item, scratch);
#endif
    with_type(a.type,
              [&](auto* t) { backward<std::remove_pointer_t<decltype(t)>, Float>(a, item, scratch); });
}

void dq_any(const Attention& a, int64_t item) {
    with_type(a.type, [&](auto* t) { add_dq<std::remove_pointer_t<decltype(t)>>(a, item); });
}

}  // namespace

void attention_backward_kernels(Kernels& table) {
    table.attention_backward = backward_any;
    table.attention_dq = dq_any;
}

}  // namespace hasten
