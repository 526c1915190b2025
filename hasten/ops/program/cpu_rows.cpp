// Instructions that work on one row at a time, and the products.
#include <algorithm>
#include <cmath>

#include "../_cpu/rows.h"
#include "../activation/kinds.h"
#include "../panels/cpu.h"
#include "cpu.h"

namespace hasten {
namespace {

// Kinds from here on are functions.
constexpr int64_t FUNCTION = 32;

inline float* element(const Operand& o, const Step& s, int64_t row, int64_t i) {
    const int64_t at = o.by == 0 ? row : o.by == 1 ? s.positions[row] : 0;
    return o.base + at * o.row_stride + i * o.s0;
}

// n values along a stride: in place where they are neighbours, else copied to `buffer`; one value for all
// (stride 0) is spread.
inline const float* along(const float* p, int64_t stride, int64_t n, float* buffer) {
    if (stride == 1) return p;
    for (int64_t j = 0; j < n; j++) buffer[j] = p[j * stride];
    return buffer;
}

void norm(const Instruction& in, const Step& s, int64_t row) {
    const int64_t n = in.n1;
    const float eps = float(in.f[0]), offset = float(in.f[1]);
    const float *weight = in.b.base, *bias = in.c.base;
    for (int64_t i = 0; i < in.n0; i++) {
        const float* x = element(in.a, s, row, i);
        float* y = element(in.dst, s, row, i);
        float mean = 0;
        if (in.i[0] == 1) mean = sum_over(n, [&](int64_t j, auto lanes) { return get(x + j, lanes); }) / n;
        const float square = sum_over(n, [&](int64_t j, auto lanes) {
            const VF v = keep(get(x + j, lanes) - mean, lanes);
            return v * v;
        });
        const float factor = 1.0f / std::sqrt(square / n + eps);
        each_vector(n, [&](int64_t j, auto lanes) {
            VF v = (get(x + j, lanes) - mean) * factor;
            if (weight) v = v * (get(weight + j, lanes) + offset);
            if (bias) v = v + get(bias + j, lanes);
            put(y + j, v, lanes);
        });
    }
}

void rotary(const Instruction& in, const Step& s, int64_t row) {
    const int64_t R = in.i[0], half = R / 2;
    const float *cos = element(in.b, s, row, 0), *sin = element(in.c, s, row, 0);
    for (int64_t i = 0; i < in.n0; i++) {
        const float* x = element(in.a, s, row, i);
        float* y = element(in.dst, s, row, i);
        if (in.i[1]) {
            for (int64_t j = 0; j < half; j++) {
                const float a = x[2 * j], b = x[2 * j + 1];
                y[2 * j] = a * cos[2 * j] - b * sin[2 * j];
                y[2 * j + 1] = b * cos[2 * j + 1] + a * sin[2 * j + 1];
            }
        } else {
            each_vector(half, [&](int64_t j, auto lanes) {
                const VF a = get(x + j, lanes), b = get(x + half + j, lanes);
                put(y + j, a * get(cos + j, lanes) - b * get(sin + j, lanes), lanes);
                put(y + half + j, b * get(cos + half + j, lanes) + a * get(sin + half + j, lanes), lanes);
            });
        }
        if (in.n1 > R) std::memcpy(y + R, x + R, size_t(in.n1 - R) * 4);
    }
}

template <class F>
void combine(const Instruction& in, const Step& s, int64_t row, float* scratch, const F& f) {
    for (int64_t i = 0; i < in.n0; i++) {
        const float* a = along(element(in.a, s, row, i), in.a.s1, in.n1, scratch);
        const float* b = along(element(in.b, s, row, i), in.b.s1, in.n1, scratch + in.n1);
        float* y = element(in.dst, s, row, i);
        each_vector(in.n1, [&](int64_t j, auto lanes) {
            put(y + j, f(get(a + j, lanes), get(b + j, lanes)), lanes);
        });
    }
}

void binary(const Instruction& in, const Step& s, int64_t row, float* scratch) {
    switch (in.i[0]) {
        case 0:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a + b; });
        case 1:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a - b; });
        case 2:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a * b; });
        case 3:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a / b; });
        case 4:
            return combine(in, s, row, scratch, [](VF a, VF b) { return (a > b) | (a != a) ? a : b; });
        case 5:
            return combine(in, s, row, scratch, [](VF a, VF b) { return (a < b) | (a != a) ? a : b; });
        case 6:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a > b ? splat(1) : VF{}; });
        case 7:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a >= b ? splat(1) : VF{}; });
        case 8:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a < b ? splat(1) : VF{}; });
        case 9:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a <= b ? splat(1) : VF{}; });
        case 10:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a == b ? splat(1) : VF{}; });
        case 11:
            return combine(in, s, row, scratch, [](VF a, VF b) { return a != b ? splat(1) : VF{}; });
        default:
            return combine(in, s, row, scratch, [](VF a, VF b) {
                for (int i = 0; i < W; i++) a[i] = std::pow(a[i], b[i]);
                return a;
            });
    }
}

void unary(const Instruction& in, const Step& s, int64_t row, float* scratch) {
    const float factor = float(in.f[0]), added = float(in.f[1]);
    for (int64_t i = 0; i < in.n0; i++) {
        float* y = element(in.dst, s, row, i);
        if (in.i[0] >= FUNCTION) {
            const float* x = element(in.a, s, row, i);
            program_function(in.i[0] - FUNCTION, x, in.a.s1, factor, added, in.n1, y);
            continue;
        }
        const float* a = along(element(in.a, s, row, i), in.a.s1, in.n1, scratch);
        if (in.i[0] < 0) {
            each_vector(
                in.n1, [&](int64_t j, auto lanes) { put(y + j, get(a + j, lanes) * factor + added, lanes); });
            continue;
        }
        with_kind(Kind(in.i[0]), [&](auto kind) {
            each_vector(in.n1, [&](int64_t j, auto lanes) {
                put(y + j, decltype(kind)::of(get(a + j, lanes) * factor + added).value, lanes);
            });
        });
    }
}

PanelProduct product(const Program& p, const Step& s, const Instruction& in) {
    PanelProduct q{};
    q.matrix = p.matrices[in.matrix];
    q.up = in.up < 0 ? nullptr : p.matrices + in.up;
    q.kind = int32_t(in.i[0]);  // -1 is NO_ACTIVATION
    q.M = in.selected ? s.wanted_rows : s.rows;
    q.x = in.a.base;
    q.x_row = in.a.row_stride;
    q.y = in.dst.base;
    q.y_row = in.dst.row_stride;
    q.residual = in.c.base;
    q.residual_row = in.c.row_stride;
    q.scale = float(in.f[0]);
    q.bf16 = p.bf16;
    q.vnni = p.vnni;
    q.brgemm = p.brgemm;
    return q;
}

int64_t units(const Program& p, const Step& s, const Instruction& in) {
    const int64_t rows = in.selected ? s.wanted_rows : s.rows;
    if (in.op == Op::experts) return experts_units(p, s, in);
    if (in.share == Share::rows) return row_units(in, rows);
    if (in.op == Op::linear) return rows ? (p.matrices[in.matrix].N + 15) / 16 : 0;
    if (in.op == Op::prepare) return rows <= p.few ? 0 : rows;
    return rows;
}

// The part of a product that belongs to rows of a thread's own.
PanelProduct with_rows(PanelProduct q, const Program& p, int64_t first, int64_t rows) {
    q.M = rows;
    q.x += first * q.x_row;
    if (q.y) q.y += first * q.y_row;
    if (q.residual) q.residual += first * q.residual_row;
    // Matrices differ in K, and nobody waits between them: a row's place is the same for all.
    q.prepared = (char*)p.prepared + first * p.prepared_row;
    return q;
}

bool own_rows(const Program& p, const Step& s) {
    for (int64_t i = 0; i < p.count; i++) {
        const Instruction& in = p.instructions[i];
        if (in.op != Op::linear || in.selected) continue;
        if (!is_bytes(p.kernels->panel_form(product(p, s, in)))) return false;
    }
    return true;
}

struct Memory {
    char* at;
    explicit Memory(void* p) : at((char*)p) {}
    void* take(int64_t bytes) {
        void* p = at;
        at += (bytes + 63) / 64 * 64;
        return p;
    }
};

int64_t scratch_bytes(const Program& p, const Step& s, const Instruction& in) {
    if (in.op == Op::linear) {
        const PanelProduct q = product(p, s, in);
        return p.kernels->panel_scratch_bytes(q) + (q.M <= p.few ? p.kernels->panel_prepared_bytes(q) : 0) +
               128;
    }
    if (in.op == Op::experts) return experts_scratch(p, s, in);
    return 2 * in.n1 * 4 + 128;
}

void run(const Program& p, const Step& s, const Instruction& in, int64_t first, int64_t count,
         void* scratch) {
    if (in.share == Share::rows) {
        const RowRange rows = rows_of_units(in, s.rows, first, count);
        first = rows.first, count = rows.count;
    }
    if (in.share == Share::rows && (in.op == Op::linear || in.op == Op::prepare)) {
        const PanelProduct q = with_rows(product(p, s, in), p, first, count);
        if (in.op == Op::prepare) return p.kernels->panel_prepare(q, 0, count);
        return p.kernels->panel_product(q, 0, panels_of(q.matrix), scratch);
    }
    if (in.op == Op::linear) {
        PanelProduct q = product(p, s, in);
        Memory memory(scratch);
        if (q.M <= p.few) {  // cheaper than a barrier
            q.prepared = memory.take(p.kernels->panel_prepared_bytes(q));
            p.kernels->panel_prepare(q, 0, q.M);
        } else {
            q.prepared = p.prepared;
        }
        return p.kernels->panel_product(q, first, count, memory.take(p.kernels->panel_scratch_bytes(q)));
    }
    if (in.op == Op::experts) return experts_run(p, s, in, first, count, scratch);
    if (in.op == Op::prepare) {
        PanelProduct q = product(p, s, in);
        q.prepared = p.prepared;
        return p.kernels->panel_prepare(q, first, count);
    }
    float* buffer = (float*)scratch;
    for (int64_t row = first; row < first + count; row++) switch (in.op) {
            case Op::embed: {
                float* y = element(in.dst, s, row, 0);
                p.kernels->panel_row(p.matrices[in.matrix], s.tokens[row], y);
                const float factor = float(in.f[0]);
                if (factor != 1)
                    each_vector(
                        in.n1, [&](int64_t j, auto lanes) { put(y + j, get(y + j, lanes) * factor, lanes); });
                break;
            }
            case Op::norm:
                norm(in, s, row);
                break;
            case Op::rotary:
                rotary(in, s, row);
                break;
            case Op::binary:
                binary(in, s, row, buffer);
                break;
            case Op::unary:
                unary(in, s, row, buffer);
                break;
            case Op::gated:
                with_kind(Kind(in.i[0]), [&](auto kind) {
                    combine(in, s, row, buffer, [](VF a, VF b) { return decltype(kind)::of(a).value * b; });
                });
                break;
            case Op::select:
                std::memcpy(element(in.dst, s, row, 0), in.a.base + s.wanted[row] * in.a.row_stride,
                            size_t(in.n1) * 4);
                break;
            default:
                program_along(s, in, row);
                break;
        }
}

}  // namespace

void program_rows_kernels(Kernels& table) {
    table.program_units = units;
    table.program_scratch = scratch_bytes;
    table.program_run = run;
    table.program_own_rows = own_rows;
}

}  // namespace hasten
