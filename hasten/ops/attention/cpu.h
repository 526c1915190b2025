// What the forward and the backward kernel of attention share: how operands are packed, and a row of scores.
//
// A KV head's G query heads are folded together: row g * rows + r of a tile is query q0 + r of head h * G +
// g. One unit is four bytes, a float or a pair of bf16 (gemm.h); "pairs along x" are units of two neighbours
// in x.
//
//   region            layout                         what it is the right operand of
//   keys_T            [D units][Sk padded]           scores = Q K^T
//   values            [Sk units][Dv padded]          out = P V                (forward)
//   values_T          [Dv units][Sk padded]          dP = dO V^T              (backward)
//   keys              [Sk units][D padded]           dQ = dS K                (backward)
//   for each block of rows (backward), M rows:
//   q rows, dO rows   [M][D units], [M][Dv units]    left operands of scores and dP
//   q pairs, dO pairs [M units][D padded], ...       dK = dS^T Q, dV = P^T dO
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../_cpu/gemm.h"
#include "../_cpu/kernels.h"
#include "../_cpu/rows.h"

namespace hasten {
namespace {

constexpr float LOG2E = 1.44269504088896341f;

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
inline int64_t round_up(int64_t a, int64_t b) {
    return ceil_div(a, b) * b;
}

// Padded sizes and the places of the regions within one (batch row, KV head).
struct Layout {
    int64_t group, per_unit, keys, d_pad, dv_pad, d_units, dv_units, key_units;
    int64_t blocks, block_rows;  // of query rows; rows of a folded tile, padded to even
    int64_t keys_T, values, values_T, keys_pairs, q_rows, do_rows, q_pairs, do_pairs, total;

    Layout(const Attention& a, bool backward) {
        group = a.Hq / a.Hkv;
        per_unit = a.bf16 ? 2 : 1;
        keys = round_up(std::max<int64_t>(a.Sk, 1), 64);
        d_pad = round_up(a.D, W);
        dv_pad = round_up(a.Dv, W);
        d_units = ceil_div(a.D, per_unit);
        dv_units = ceil_div(a.Dv, per_unit);
        key_units = keys / per_unit;
        blocks = ceil_div(a.Sq, a.rows);
        block_rows = round_up(a.rows * group, 2);
        int64_t at = 0;
        auto place = [&at](int64_t size) {
            const int64_t start = at;
            at += round_up(size, 16);
            return start;
        };
        keys_T = place(d_units * keys);
        values = backward ? 0 : place(key_units * dv_pad);
        values_T = backward ? place(dv_units * keys) : 0;
        keys_pairs = backward ? place(key_units * d_pad) : 0;
        q_rows = backward ? place(blocks * block_rows * d_units) : 0;
        do_rows = backward ? place(blocks * block_rows * dv_units) : 0;
        q_pairs = backward ? place(blocks * block_rows / per_unit * d_pad) : 0;
        do_pairs = backward ? place(blocks * block_rows / per_unit * dv_pad) : 0;
        total = at;
    }
};

// The query rows and keys of one item of work.
struct Block {
    int64_t b, hk, index, part, q0, q1, first_key, last_key;

    // Item order: heavy blocks (late rows) first, so that threads finish together.
    Block(const Attention& a, const Layout& l, int64_t item, int64_t parts) {
        part = item % parts;
        item /= parts;
        hk = item % a.Hkv;
        item /= a.Hkv;
        b = item % a.B;
        index = l.blocks - 1 - item / a.B;
        q0 = index * a.rows;
        q1 = std::min(a.Sq, q0 + a.rows);
        first_key = a.Sk;
        last_key = 0;
        for (int64_t i = q0; i < q1; i++) {
            const int32_t* bound = a.bounds + b * a.bounds_b + 2 * i;
            if (bound[0] >= bound[1]) continue;
            first_key = std::min<int64_t>(first_key, bound[0]);
            last_key = std::max<int64_t>(last_key, bound[1]);
        }
        if (parts > 1) {  // this part's share of the keys, in whole groups of 64
            const int64_t share = round_up(ceil_div(a.Sk, parts), 64);
            first_key = std::max(first_key, part * share);
            last_key = std::min(last_key, (part + 1) * share);
        }
    }
};

inline uint32_t unit_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

// bf16 bits of x, kept as they are where x is bf16 already.
template <class T>
inline uint32_t bf16_bits(const T* p) {
    if constexpr (std::is_same_v<T, bf16>)
        return p->bits;
    else
        return narrow_scalar_bf16(widen_scalar(*p)).bits;
}

// A row of n elements as units: d[i] = row[i], or the pair (row[2i], row[2i + 1]) with zero behind the end.
template <class T>
inline void pack_row(const Attention& a, const T* row, int64_t n, uint32_t* d) {
    if (!a.bf16) {
        int64_t i = 0;
        for (; i + W <= n; i += W) store((float*)d + i, load_float(row + i));
        for (; i < n; i++) d[i] = unit_of(widen_scalar(row[i]));
        return;
    }
    if constexpr (std::is_same_v<T, bf16>) {
        if (n & 1) d[n / 2] = 0;
        std::memcpy(d, row, n * 2);
        return;
    }
    for (int64_t i = 0; i < n; i += 2)
        d[i / 2] = bf16_bits(row + i) | (i + 1 < n ? bf16_bits(row + i + 1) << 16 : 0);
}

// Two rows of n elements as pairs along the rows: d[i] = (r0[i], r1[i]); either may be null (zeros). With
// floats only r0 is stored. Columns n..pad become zero.
template <class T>
inline void pack_pair(const Attention& a, const T* r0, const T* r1, int64_t n, int64_t pad, uint32_t* d) {
    int64_t i = 0;
    if (!a.bf16) {
        for (; r0 && i + W <= n; i += W) store((float*)d + i, load_float(r0 + i));
        for (; i < n; i++) d[i] = r0 ? unit_of(widen_scalar(r0[i])) : 0;
    } else {
        if constexpr (std::is_same_v<T, bf16>)
            for (; r0 && r1 && i + W <= n; i += W) {
                const VU low = __builtin_convertvector(load_half(r0 + i), VU);
                const VU high = __builtin_convertvector(load_half(r1 + i), VU);
                const VU both = low | (high << 16);
                std::memcpy(d + i, &both, sizeof both);
            }
        for (; i < n; i++) d[i] = (r0 ? bf16_bits(r0 + i) : 0) | (r1 ? bf16_bits(r1 + i) << 16 : 0);
    }
    for (; i < pad; i++) d[i] = 0;
}

// Rows [S, n] transposed into units [n units][S padded]; 16 rows at a time, each row read once.
template <class T>
inline void pack_transposed(const Attention& a, const T* rows, int64_t stride, int64_t S, int64_t n,
                            int64_t pad, uint32_t* d) {
    const int64_t units = a.bf16 ? ceil_div(n, 2) : n;
    uint32_t row[16][256];
    for (int64_t s = 0; s < pad; s += 16) {
        const int64_t count = std::max<int64_t>(0, std::min<int64_t>(16, S - s));
        for (int64_t u0 = 0; u0 < units; u0 += 256) {
            const int64_t some = std::min<int64_t>(256, units - u0), per = a.bf16 ? 2 : 1;
            for (int64_t i = 0; i < count; i++)
                pack_row(a, rows + (s + i) * stride + u0 * per, std::min(some * per, n - u0 * per), row[i]);
            for (int64_t i = count; i < 16; i++) std::memset(row[i], 0, some * 4);
            for (int64_t u = 0; u < some; u++) {
                uint32_t* to = d + (u0 + u) * pad + s;
                for (int64_t i = 0; i < 16; i++) to[i] = row[i][u];
            }
        }
    }
}

// Whether every element of [S, n] is finite: the sum of x * 0 is 0, else NaN.
template <class T>
inline bool finite_rows(const T* rows, int64_t stride, int64_t S, int64_t n) {
    VF total{};
    for (int64_t s = 0; s < S; s++)
        each_vector(n,
                    [&](int64_t i, auto lanes) { total = total + get(rows + s * stride + i, lanes) * 0.0f; });
    return sum(total) == 0;
}

// One row of a tile of scores: what is added to the products and which columns count.
struct Row {
    int64_t begin, end;  // visible columns of the tile; none if begin >= end
    float scale, softcap, slope, slope_at;
    const float* bias;  // at column 0, or null
    bool plain;

    Row(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k0, int64_t n) {
        const int32_t* bound = a.bounds + b * a.bounds_b + 2 * i;
        begin = std::max<int64_t>(bound[0] - k0, 0);
        end = std::min<int64_t>(bound[1] - k0, n);
        scale = a.scale;
        softcap = a.softcap;
        slope = a.alibi ? a.alibi[h] : 0;
        slope_at = float(k0 - (i + a.Sk - a.Sq));
        bias = a.bias ? a.bias + b * a.bias_b + h * a.bias_h + i * a.bias_q + k0 : nullptr;
        plain = !a.alibi && !bias && softcap == 0 && scale > 0;
    }

    // The score of columns c .. c + W from their products; `capped` gets tanh(scaled / cap) for the
    // derivative.
    inline VF score(VF product, int64_t c, int64_t n_bias, VI lane, VF* capped) const {
        VF s = product * scale;
        if (softcap > 0) {
            const VF t = tanh_of(s * (1.0f / softcap));
            if (capped) *capped = t;
            s = t * softcap;
        }
        if (slope != 0) s = s + slope * (__builtin_convertvector(lane, VF) + (slope_at + float(c)));
        if (bias)
            s = s + (c + W <= n_bias ? load(bias + c)
                                     : load_part(bias + c, int(std::max<int64_t>(0, n_bias - c))));
        return s;
    }
};

template <class Unit>
struct Gemm {
    Brgemm brgemm;
    uint32_t* transposed;  // scratch for the left operand of a product over rows, for brgemm alone

    // C [M, N] (+)= A B, A row-major.
    HASTEN_PAIRS_TARGET void operator()(int64_t M, int64_t N, int64_t K, const uint32_t* A, int64_t lda,
                                        const uint32_t* B, int64_t ldb, float* C, int64_t ldc,
                                        bool add) const {
        if (brgemm && Unit::per_unit == 2)
            brgemm(M, N, 2 * K, 2 * lda, ldb, ldc, add, A, B, C);
        else
            gemm<Unit>(M, N, {K, A, lda, 1, B, ldb, C, ldc, add});
    }

    // C [M, N] (+)= A^T B, A stored [K units][lda].
    HASTEN_PAIRS_TARGET void left_transposed(int64_t M, int64_t N, int64_t K, const uint32_t* A, int64_t lda,
                                             const uint32_t* B, int64_t ldb, float* C, int64_t ldc,
                                             bool add) const {
        if (brgemm && Unit::per_unit == 2) {
            for (int64_t k0 = 0; k0 < K; k0 += 16)
                for (int64_t m = 0; m < M; m++)
                    for (int64_t k = k0; k < std::min(K, k0 + 16); k++)
                        transposed[m * K + k] = A[k * lda + m];
            brgemm(M, N, 2 * K, 2 * K, ldb, ldc, add, transposed, B, C);
        } else {
            gemm<Unit>(M, N, {K, A, 1, lda, B, ldb, C, ldc, add});
        }
    }
};

// Hands out pieces of a thread's scratch, 64-byte aligned.
struct Scratch {
    char* at;
    int64_t used = 0;
    explicit Scratch(void* base) : at((char*)base) {}
    template <class T>
    T* take(int64_t count) {
        T* p = (T*)(at + used);
        used += round_up(count * int64_t(sizeof(T)), 64);
        return p;
    }
};

}  // namespace
}  // namespace hasten
