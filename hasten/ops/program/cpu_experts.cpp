// Products with experts: rows that chose the same one are multiplied together, and only chosen ones are read.
//
// The matrices of all experts lie below each other, each with panels of its own. A row's result does not
// depend on which rows share its expert, as with every product by panels.
#include <algorithm>
#include <cmath>

#include "../_cpu/rows.h"
#include "../panels/cpu.h"
#include "cpu.h"

namespace hasten {
namespace {

constexpr int64_t MOST_EXPERTS = 4096;
// Pairs of a row and a slot that one product serves: bounds the scratch memory.
constexpr int64_t TOGETHER = 128;

inline int64_t expert_of(const Instruction& in, int64_t pair) {
    const float v = in.b.base[pair / in.n0 * in.b.row_stride + pair % in.n0 * in.b.s1];
    return v >= 0 ? std::min(int64_t(v), in.i[1] - 1) : 0;
}

inline int64_t panels_each(const Instruction& in) {
    return (in.i[0] + PANEL_ROWS - 1) / PANEL_ROWS;
}

PanelProduct product(const Program& p, const Instruction& in, int64_t expert, int64_t M) {
    PanelProduct q{};
    q.matrix = p.matrices[in.matrix];
    q.matrix.data += expert * panels_each(in) * q.matrix.panel_bytes;
    q.matrix.N = in.i[0];
    if (q.matrix.bias) q.matrix.bias += expert * in.i[0];
    q.kind = NO_ACTIVATION;
    q.M = M;
    q.scale = 1;
    q.bf16 = p.bf16;
    q.vnni = p.vnni;
    q.brgemm = p.brgemm;
    return q;
}

struct Memory {
    char* at;
    explicit Memory(void* p) : at((char*)p) {}
    template <class T>
    T* take(int64_t count) {
        T* p = (T*)at;
        at += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return p;
    }
};

int64_t rows_of(const Step& s, const Instruction& in) {
    return in.selected ? s.wanted_rows : s.rows;
}

// The most of a size that any number of rows up to `most` takes.
template <class F>
int64_t largest(const Program& p, const Instruction& in, int64_t most, const F& size) {
    int64_t bytes = 0;
    for (int64_t M = 1; M <= most; M++) bytes = std::max(bytes, size(product(p, in, 0, M)));
    return bytes;
}

}  // namespace

int64_t experts_units(const Program&, const Step& s, const Instruction& in) {
    uint64_t chosen[MOST_EXPERTS / 64] = {};
    int64_t count = 0;
    for (int64_t pair = 0; pair < rows_of(s, in) * in.n0; pair++) {
        const int64_t e = expert_of(in, pair);
        count += ~chosen[e / 64] >> e % 64 & 1;
        chosen[e / 64] |= uint64_t(1) << e % 64;
    }
    return count * panels_each(in);
}

int64_t experts_scratch(const Program& p, const Step& s, const Instruction& in) {
    const int64_t pairs = rows_of(s, in) * in.n0, most = std::min(pairs, TOGETHER);
    const int64_t prepared = largest(p, in, most, p.kernels->panel_prepared_bytes);
    const int64_t scratch = largest(p, in, most, p.kernels->panel_scratch_bytes);
    return pairs * 4 + (in.i[1] + 1) * 4 + most * (in.n1 + in.i[0]) * 4 + prepared + scratch + 6 * 64;
}

void experts_run(const Program& p, const Step& s, const Instruction& in, int64_t first, int64_t count,
                 void* scratch) {
    const int64_t pairs = rows_of(s, in) * in.n0, E = in.i[1], K = in.n1, N = in.i[0];
    const int64_t each = panels_each(in), most = std::min(pairs, TOGETHER);
    Memory memory(scratch);
    int32_t *order = memory.take<int32_t>(pairs), *ends = memory.take<int32_t>(E + 1);
    float *x = memory.take<float>(most * K), *y = memory.take<float>(most * N);
    void* prepared = memory.take<char>(largest(p, in, most, p.kernels->panel_prepared_bytes));
    // Pairs in the order of their experts.
    std::fill(ends, ends + E + 1, 0);
    for (int64_t pair = 0; pair < pairs; pair++) ends[expert_of(in, pair) + 1]++;
    for (int64_t e = 0; e < E; e++) ends[e + 1] += ends[e];
    for (int64_t pair = 0; pair < pairs; pair++) order[ends[expert_of(in, pair)]++] = int32_t(pair);

    int64_t unit = 0;  // the first panel of the next expert that is chosen
    for (int64_t e = 0; e < E && unit < first + count; e++) {
        const int64_t begin = e ? ends[e - 1] : 0, end = ends[e];
        if (begin == end) continue;
        const int64_t from = std::max(first - unit, int64_t(0)), to = std::min(first + count - unit, each);
        unit += each;
        for (int64_t at = begin; from < to && at < end; at += most) {
            const int64_t M = std::min(end - at, most);
            for (int64_t m = 0; m < M; m++) {
                const int64_t row = order[at + m] / in.n0, slot = order[at + m] % in.n0;
                std::memcpy(x + m * K, in.a.base + row * in.a.row_stride + slot * in.a.s0, size_t(K) * 4);
            }
            PanelProduct q = product(p, in, e, M);
            q.x = x;
            q.x_row = K;
            q.y = y;
            q.y_row = N;
            q.prepared = prepared;
            p.kernels->panel_prepare(q, 0, M);
            p.kernels->panel_product(q, from, to - from, memory.at);
            const int64_t column = from * PANEL_ROWS, columns = std::min(to * PANEL_ROWS, N) - column;
            for (int64_t m = 0; m < M; m++) {
                const int64_t row = order[at + m] / in.n0, slot = order[at + m] % in.n0;
                std::memcpy(in.dst.base + row * in.dst.row_stride + slot * in.dst.s0 + column,
                            y + m * N + column, size_t(columns) * 4);
            }
        }
    }
}

}  // namespace hasten
