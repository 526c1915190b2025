// Where a row's keys and values lie in the paged cache.
#pragma once

#include "../_cpu/vec.h"
#include "cpu.h"

namespace hasten {
namespace {

constexpr int64_t T = BLOCK_TOKENS, PART_TOKENS = PART_BLOCKS * T;

inline const float* row_of(const Operand& o, int64_t row, int64_t head) {
    return o.base + row * o.row_stride + head * o.s0;
}

inline uint32_t* block_of(const CacheLayer& c, const Step& s, int64_t sequence, int64_t index) {
    return c.base + s.tables[c.group][sequence * s.table_width[c.group] + index] * c.block_units;
}

// What belongs to one KV head in a block lies together: its keys, then its values, so that one run of memory
// is read for both.
struct Head {
    uint32_t *k, *v;
    Head(const CacheLayer& c, uint32_t* block, int64_t h) {
        k = block + h * c.head_units;
        v = k + c.d_units * T;
    }
};

// The same in bytes: K as pairs [D / 2, 32], V as pairs of tokens [16, Dv padded], and one scale for each
// token.
struct Bytes {
    uint16_t *k, *v;  // pairs
    float *k_scale, *v_scale;
    Bytes(const CacheLayer& c, uint32_t* block, int64_t h) {
        k = (uint16_t*)Head(c, block, h).k;
        v = k + c.d_units * T;
        k_scale = (float*)(v + T / 2 * c.dv_pad);
        v_scale = k_scale + T;
    }
};

}  // namespace

// Keys and values of rows [first, first + count) of the step to their blocks; memory: store_floats.
void store_rows(const Program& p, const Step& s, const Instruction& in, int64_t first, int64_t count,
                float* memory);
int64_t store_floats(const CacheLayer& c);

}  // namespace hasten
