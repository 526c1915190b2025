// Attention, forward: online softmax over tiles of keys (Milakov and Gimelshein 2018; Dao et al. 2022), exact
// intervals of visible keys for each row, fp32 scores and sums, products of bf16 pairs or floats.
#include "cpu.h"

namespace hasten {
namespace {

template <class T>
bool pack(const Attention& a, bool backward, int64_t item) {
    const Layout l(a, backward);
    const int64_t b = item / a.Hkv, hk = item % a.Hkv;
    uint32_t* packed = a.packed + item * a.packed_stride;
    const T* k = (const T*)a.k + b * a.k_b + hk * a.k_h;
    const T* v = (const T*)a.v + b * a.v_b + hk * a.v_h;
    bool finite = finite_rows(k, a.k_s, a.Sk, a.D) && finite_rows(v, a.v_s, a.Sk, a.Dv);
    pack_transposed(a, k, a.k_s, a.Sk, a.D, l.keys, packed + l.keys_T);
    auto pairs = [&](const T* rows, int64_t stride, int64_t n, int64_t pad, uint32_t* to) {
        for (int64_t u = 0; u < l.key_units; u++) {
            const int64_t s = u * l.per_unit;
            pack_pair(a, s < a.Sk ? rows + s * stride : nullptr,
                      s + 1 < a.Sk ? rows + (s + 1) * stride : nullptr, n, pad, to + u * pad);
        }
    };
    if (!backward) {
        pairs(v, a.v_s, a.Dv, l.dv_pad, packed + l.values);
        return finite;
    }
    pack_transposed(a, v, a.v_s, a.Sk, a.Dv, l.keys, packed + l.values_T);
    pairs(k, a.k_s, a.D, l.d_pad, packed + l.keys_pairs);
    for (int64_t index = 0; index < l.blocks; index++) {
        const int64_t q0 = index * a.rows, count = std::min(a.Sq, q0 + a.rows) - q0, M = l.group * count;
        auto q_row = [&](int64_t m) {
            return m < M ? (const T*)a.q + b * a.q_b + (hk * l.group + m / count) * a.q_h +
                               (q0 + m % count) * a.q_s
                         : nullptr;
        };
        auto do_row = [&](int64_t m) {
            return m < M ? (const T*)a.grad + b * a.grad_b + (hk * l.group + m / count) * a.grad_h +
                               (q0 + m % count) * a.grad_s
                         : nullptr;
        };
        uint32_t* q_rows = packed + l.q_rows + index * l.block_rows * l.d_units;
        uint32_t* do_rows = packed + l.do_rows + index * l.block_rows * l.dv_units;
        uint32_t* q_pairs = packed + l.q_pairs + index * (l.block_rows / l.per_unit) * l.d_pad;
        uint32_t* do_pairs = packed + l.do_pairs + index * (l.block_rows / l.per_unit) * l.dv_pad;
        for (int64_t m = 0; m < M; m++) {
            finite = finite && finite_rows(q_row(m), 0, 1, a.D) && finite_rows(do_row(m), 0, 1, a.Dv);
            pack_row(a, q_row(m), a.D, q_rows + m * l.d_units);
            pack_row(a, do_row(m), a.Dv, do_rows + m * l.dv_units);
        }
        for (int64_t m = 0; m < M; m += l.per_unit) {
            pack_pair(a, q_row(m), q_row(m + 1), a.D, l.d_pad, q_pairs + m / l.per_unit * l.d_pad);
            pack_pair(a, do_row(m), do_row(m + 1), a.Dv, l.dv_pad, do_pairs + m / l.per_unit * l.dv_pad);
        }
        // delta = sum of dO * O over a row (Dao et al. 2022, eq. 4), added in the order of the product dO
        // V^T: where a row sees one key the two are then the same number, and dS is exactly zero.
        for (int64_t m0 = 0; m0 < M; m0 += 8) {
            const int64_t some = std::min<int64_t>(8, M - m0);
            const T *out[8], *grad[8];
            float delta[8] = {};
            for (int64_t r = 0; r < some; r++) {
                const int64_t m = m0 + r, h = hk * l.group + m / count, i = q0 + m % count;
                out[r] = (const T*)a.out + ((b * a.Sq + i) * a.Hq + h) * a.Dv;
                grad[r] = do_row(m);
            }
            for (int64_t d = 0; d < a.Dv; d++)
                for (int64_t r = 0; r < some; r++)
                    delta[r] += widen_scalar(grad[r][d]) * widen_scalar(out[r][d]);
            for (int64_t r = 0; r < some; r++) {
                const int64_t m = m0 + r;
                const int64_t at = (b * a.Hq + hk * l.group + m / count) * a.Sq + q0 + m % count;
                a.delta[at] = delta[r];
                // exp(score - lse) needs the fraction of lse, which is lost where a mask is a huge finite
                // number.
                finite = finite && !(std::abs(a.lse[at]) > 16384 && a.lse[at] != -INF);
            }
        }
    }
    return finite;
}

// Turns products into probabilities relative to the new maximum, for columns [0, n): `unit_row` gets them as
// left operands. Returns the factor for what was summed before.
template <class Unit>
HASTEN_PAIRS_TARGET inline float softmax_row(const Row& row, float* s, int64_t n, int64_t n_bias,
                                             float& largest, float& total, uint32_t* unit_row) {
    if (row.begin >= row.end) {
        std::memset(unit_row, 0, size_t(n / Unit::per_unit) * 4);
        return 1;
    }
    const VI lane = lane_numbers();
    const int64_t first = row.begin / W * W, last = round_up(row.end, W);
    auto hidden = [&](int64_t c, VF x) {
        const VI at = lane + int32_t(c);
        return ((at >= int32_t(row.begin)) & (at < int32_t(row.end))) ? x : splat(-INF);
    };
    VF top = splat(-INF);
    for (int64_t c = first; c < last; c += W) {
        VF x = load(s + c);
        if (!row.plain) x = row.score(x, c, n_bias, lane, nullptr);
        const bool edge = c < row.begin || c + W > row.end;
        if (edge) x = hidden(c, x);
        if (edge || !row.plain) store(s + c, x);
        top = ((x > top) | (x != x)) ? x : top;
    }
    // A plain score stays a product: the scale goes into the exponent.
    const float scale = row.plain ? row.scale : 1.0f;
    float peak = largest;
    for (int i = 0; i < W; i++) {
        const float x = top[i] * scale;
        peak = x > peak || x != x ? x : peak;
    }
    if (peak == -INF) {  // every visible score is -inf
        std::memset(unit_row, 0, size_t(n / Unit::per_unit) * 4);
        return 1;
    }
    const float factor = largest == -INF ? 0.0f : std::exp(largest - peak);
    // Subtracted before the multiplication where a mask may be the lowest float.
    const float slope = scale * LOG2E, first_shift = row.plain ? 0 : -peak,
                shift = row.plain ? -peak * LOG2E : 0;
    VF added{};
    for (int64_t c = first; c < last; c += W) {
        const VF p = exp2_of((load(s + c) + first_shift) * slope + shift);
        added = added + p;
        if constexpr (Unit::per_unit == 1)
            store((float*)unit_row + c, p);
        else
            store_half((uint16_t*)unit_row + c, narrow_fast(p));
    }
    std::memset(unit_row, 0, size_t(first / Unit::per_unit) * 4);
    std::memset(unit_row + last / Unit::per_unit, 0, size_t((n - last) / Unit::per_unit) * 4);
    total = total * factor + sum(added);
    largest = peak;
    return factor;
}

// out = o / total and lse, with the head's sink counted in; zeros for a row that saw nothing.
template <class T>
inline void finish_row(const Attention& a, int64_t b, int64_t h, int64_t i, const float* o, float largest,
                       float total) {
    T* out = (T*)a.out + ((b * a.Sq + i) * a.Hq + h) * a.Dv;
    float* lse = a.lse + (b * a.Hq + h) * a.Sq + i;
    float share = 1;
    if (a.sinks) {
        const float sink = a.sinks[h], peak = largest > sink || largest != largest ? largest : sink;
        share = largest == -INF ? 0.0f : std::exp(largest - peak);
        total = (largest == -INF ? 0.0f : total * share) + std::exp(sink - peak);
        largest = peak;
    }
    *lse = total == 0 ? -INF : largest + std::log(total);
    const float scale = total == 0 ? 0.0f : share / total;
    each_vector(a.Dv, [&](int64_t d, auto lanes) { put(out + d, load(o + d) * scale, lanes); });
}

// Writes a finished block, or its part of the keys for the merge.
template <class T>
inline void finish_block(const Attention& a, const Layout& l, const Block& block, int64_t item,
                         const float* o, const float* largest, const float* total) {
    const int64_t count = block.q1 - block.q0, M = l.group * count;
    float* to = a.parts > 1 ? a.partial + item * (a.rows * l.group) * (l.dv_pad + 2) : nullptr;
    for (int64_t m = 0; m < M; m++) {
        if (!to) {
            finish_row<T>(a, block.b, block.hk * l.group + m / count, block.q0 + m % count, o + m * l.dv_pad,
                          largest[m], total[m]);
            continue;
        }
        std::memcpy(to, o + m * l.dv_pad, size_t(l.dv_pad) * 4);
        to[l.dv_pad] = largest[m];
        to[l.dv_pad + 1] = total[m];
        to += l.dv_pad + 2;
    }
}

template <class T, class Unit>
HASTEN_PAIRS_TARGET void forward(const Attention& a, int64_t item, void* memory) {
    const Layout l(a, false);
    const Block block(a, l, item, a.parts);
    const int64_t count = block.q1 - block.q0, M = l.group * count;
    const uint32_t* packed = a.packed + (block.b * a.Hkv + block.hk) * a.packed_stride;
    Scratch scratch(memory);
    uint32_t* q = scratch.take<uint32_t>(M * l.d_units);
    float* s = scratch.take<float>(M * a.cols);
    uint32_t* p = scratch.take<uint32_t>(M * a.cols / l.per_unit);
    float* o = scratch.take<float>(M * l.dv_pad);
    float* largest = scratch.take<float>(M);
    float* total = scratch.take<float>(M);
    const Gemm<Unit> product{a.brgemm, nullptr};

    for (int64_t m = 0; m < M; m++) {
        pack_row(a,
                 (const T*)a.q + block.b * a.q_b + (block.hk * l.group + m / count) * a.q_h +
                     (block.q0 + m % count) * a.q_s,
                 a.D, q + m * l.d_units);
        largest[m] = -INF;
        total[m] = 0;
    }
    std::memset(o, 0, size_t(M * l.dv_pad) * 4);
    for (int64_t k0 = block.first_key / 64 * 64; k0 < block.last_key; k0 += a.cols) {
        const int64_t n = std::min(a.cols, round_up(block.last_key - k0, 32)),
                      n_bias = std::min(n, a.Sk - k0);
        product(M, n, l.d_units, q, l.d_units, packed + l.keys_T + k0, l.keys, s, a.cols, false);
        for (int64_t m = 0; m < M; m++) {
            Row row(a, block.b, block.hk * l.group + m / count, block.q0 + m % count, k0, n);
            row.end = std::min(row.end, block.last_key - k0);
            const float factor = softmax_row<Unit>(row, s + m * a.cols, n, n_bias, largest[m], total[m],
                                                   p + m * a.cols / l.per_unit);
            if (factor != 1)
                for (int64_t d = 0; d < l.dv_pad; d += W)
                    store(o + m * l.dv_pad + d, load(o + m * l.dv_pad + d) * factor);
        }
        product(M, l.dv_pad, n / l.per_unit, p, a.cols / l.per_unit,
                packed + l.values + k0 / l.per_unit * l.dv_pad, l.dv_pad, o, l.dv_pad, true);
    }
    finish_block<T>(a, l, block, item, o, largest, total);
}

// Few query rows (decoding): every key and value is read once and used a few times, so packing it would be
// most of the work. Reads the rows where they lie, widened to float; a probability of exactly zero adds
// nothing, so values that are not finite stay with the rows that see them.
template <class T>
void forward_few(const Attention& a, int64_t item, void* memory) {
    const Layout l(a, false);
    const Block block(a, l, item, a.parts);
    const int64_t count = block.q1 - block.q0, M = l.group * count;
    const T* k = (const T*)a.k + block.b * a.k_b + block.hk * a.k_h;
    const T* v = (const T*)a.v + block.b * a.v_b + block.hk * a.v_h;
    Scratch scratch(memory);
    float* q = scratch.take<float>(M * l.d_pad);
    float* s = scratch.take<float>(M * a.cols);
    float* p = scratch.take<float>(M * a.cols);
    float* o = scratch.take<float>(M * l.dv_pad);
    float* largest = scratch.take<float>(M);
    float* total = scratch.take<float>(M);
    float* wide = scratch.take<float>(std::max(l.d_pad, l.dv_pad));

    // The pad behind the row's end becomes zero.
    auto widen = [](const T* row, int64_t n, float* to) {
        each_vector(n, [&](int64_t d, auto lanes) { store(to + d, get(row + d, lanes)); });
    };
    for (int64_t m = 0; m < M; m++) {
        const int64_t h = block.hk * l.group + m / count, i = block.q0 + m % count;
        widen((const T*)a.q + block.b * a.q_b + h * a.q_h + i * a.q_s, a.D, q + m * l.d_pad);
        largest[m] = -INF;
        total[m] = 0;
    }
    std::memset(o, 0, size_t(M * l.dv_pad) * 4);
    for (int64_t k0 = block.first_key / 64 * 64; k0 < block.last_key; k0 += a.cols) {
        const int64_t n = std::min(a.cols, round_up(block.last_key - k0, 32)), keys = std::min(n, a.Sk - k0);
        for (int64_t j = 0; j < keys; j++) {
            widen(k + (k0 + j) * a.k_s, a.D, wide);
            for (int64_t m = 0; m < M; m++) {
                VF sum_m{};
                for (int64_t d = 0; d < l.d_pad; d += W)
                    sum_m = sum_m + load(wide + d) * load(q + m * l.d_pad + d);
                s[m * a.cols + j] = sum(sum_m);
            }
        }
        for (int64_t m = 0; m < M; m++) {
            for (int64_t j = keys; j < n; j++) s[m * a.cols + j] = 0;
            Row row(a, block.b, block.hk * l.group + m / count, block.q0 + m % count, k0, n);
            row.end = std::min(row.end, block.last_key - k0);
            const float factor = softmax_row<Float>(row, s + m * a.cols, n, keys, largest[m], total[m],
                                                    (uint32_t*)(p + m * a.cols));
            if (factor != 1)
                for (int64_t d = 0; d < l.dv_pad; d += W)
                    store(o + m * l.dv_pad + d, load(o + m * l.dv_pad + d) * factor);
        }
        for (int64_t j = 0; j < keys; j++) {
            bool wanted = false;
            for (int64_t m = 0; m < M; m++) wanted = wanted || p[m * a.cols + j] != 0;
            if (!wanted) continue;
            widen(v + (k0 + j) * a.v_s, a.Dv, wide);
            for (int64_t m = 0; m < M; m++) {
                const float share = p[m * a.cols + j];
                if (share == 0) continue;
                float* to = o + m * l.dv_pad;
                for (int64_t d = 0; d < l.dv_pad; d += W)
                    store(to + d, load(to + d) + load(wide + d) * share);
            }
        }
    }
    finish_block<T>(a, l, block, item, o, largest, total);
}

template <class T>
void merge(const Attention& a, int64_t item) {
    const Layout l(a, false);
    const Block block(a, l, item, 1);
    const int64_t count = block.q1 - block.q0, size = l.dv_pad + 2;
    float* parts = a.partial + item * a.parts * (a.rows * l.group) * size;
    for (int64_t m = 0; m < l.group * count; m++) {
        float* sum_o = parts + m * size;
        for (int64_t part = 1; part < a.parts; part++) {
            const float* o = parts + (part * a.rows * l.group + m) * size;
            const float mine = sum_o[l.dv_pad], its = o[l.dv_pad];
            if (its == -INF && o[l.dv_pad + 1] == 0) continue;
            const float peak = mine > its || mine != mine ? mine : its;
            const float x = mine == -INF ? 0.0f : std::exp(mine - peak), y = std::exp(its - peak);
            for (int64_t d = 0; d < l.dv_pad; d += W) store(sum_o + d, load(sum_o + d) * x + load(o + d) * y);
            sum_o[l.dv_pad + 1] = sum_o[l.dv_pad + 1] * x + o[l.dv_pad + 1] * y;
            sum_o[l.dv_pad] = peak;
        }
        finish_row<T>(a, block.b, block.hk * l.group + m / count, block.q0 + m % count, sum_o,
                      sum_o[l.dv_pad], sum_o[l.dv_pad + 1]);
    }
}

AttentionSizes sizes(const Attention& a, bool backward) {
    const Layout l(a, backward);
    const int64_t M = l.block_rows, tile = M * a.cols;
    AttentionSizes size{};
    size.packed = l.total;
    size.partial = a.parts > 1 ? a.parts * l.blocks * a.B * a.Hkv * (a.rows * l.group) * (l.dv_pad + 2) : 0;
    size.dq_part = backward ? l.blocks * l.block_rows * l.d_pad : 0;
    const int64_t forward_units = M * l.d_pad + 2 * tile + M * (l.dv_pad + 2) + l.d_pad + l.dv_pad;
    const int64_t backward_units = 6 * tile + a.cols * (l.d_pad + l.dv_pad + M);
    size.scratch = 4 * (backward ? backward_units : forward_units) + 64 * 16;
    return size;
}

bool pack_any(const Attention& a, bool backward, int64_t item) {
    return with_type(a.type,
                     [&](auto* t) { return pack<std::remove_pointer_t<decltype(t)>>(a, backward, item); });
}

void forward_any(const Attention& a, int64_t item, void* scratch) {
    if (!a.packed) {
        return with_type(a.type,
                         [&](auto* t) { forward_few<std::remove_pointer_t<decltype(t)>>(a, item, scratch); });
    }
#if defined(__AVX512F__)
    if (a.bf16) return forward<bf16, PairBF16>(a, item, scratch);
#endif
    with_type(a.type, [&](auto* t) { forward<std::remove_pointer_t<decltype(t)>, Float>(a, item, scratch); });
}

void merge_any(const Attention& a, int64_t item) {
    with_type(a.type, [&](auto* t) { merge<std::remove_pointer_t<decltype(t)>>(a, item); });
}

}  // namespace

void attention_forward_kernels(Kernels& table) {
    table.attention_sizes = sizes;
    table.attention_pack = pack_any;
    table.attention_forward = forward_any;
    table.attention_merge = merge_any;
}

}  // namespace hasten
