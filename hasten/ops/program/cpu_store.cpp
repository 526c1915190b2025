// Writes keys and values to the paged cache, one token or, where a pair of them is at hand, two at a time.
#include <algorithm>

#include "../_cpu/rows.h"
#include "cache.h"
#include "integers.h"

namespace hasten {
namespace {

// n values that are neighbours: where they lie, or copied to `buffer`.
inline const float* neighbours(const float* x, int64_t stride, int64_t n, float* buffer) {
    if (stride == 1) return x;
    for (int64_t d = 0; d < n; d++) buffer[d] = x[d * stride];
    return buffer;
}

inline void to_bf16(const float* x, int64_t n, uint16_t* to) {
    each_vector(n, [&](int64_t d, auto lanes) { put((bf16*)to + d, get(x + d, lanes), lanes); });
}

void store_bytes(const CacheLayer& c, uint32_t* block, int64_t h, int64_t place, const float* k,
                 const float* v, int8_t* buffer) {
    const Bytes b(c, block, h);
    buffer[c.D] = 0;  // the second of a pair, where D is odd
    b.k_scale[place] = to_integers(k, c.D, 127, buffer);
    for (int64_t u = 0; u < c.d_units; u++) std::memcpy(b.k + u * T + place, buffer + 2 * u, 2);
    b.v_scale[place] = to_integers(v, c.Dv, 127, buffer);
    int8_t* to = (int8_t*)(b.v + place / 2 * c.dv_pad) + place % 2;
    for (int64_t d = 0; d < c.Dv; d++) to[2 * d] = buffer[d];
}

// K of one token.
void store_pairs(const CacheLayer& c, uint32_t* to, const float* k, uint16_t* buffer) {
    buffer[c.D] = 0;
    to_bf16(k, c.D, buffer);
    for (int64_t u = 0; u < c.d_units; u++) std::memcpy(to + u * T, buffer + 2 * u, 4);
}

// V of an even token and the next.
void store_two(const CacheLayer& c, uint32_t* to, const float* v, const float* next) {
    each_vector(c.Dv, [&](int64_t d, auto lanes) {
        const VU low = widen_bits(narrow_bf16(get(v + d, lanes)));
        const VU high = widen_bits(narrow_bf16(get(next + d, lanes)));
        put((float*)to + d, (VF)(low | high << 16), lanes);
    });
}

// V of one token. The other half of the pair may hold what another sequence left: zero, unless this step
// writes it, perhaps in another thread.
void store_one(const CacheLayer& c, uint32_t* to, const float* v, int64_t half, bool alone,
               uint16_t* buffer) {
    to_bf16(v, c.Dv, buffer);
    for (int64_t d = 0; d < c.Dv; d++) {
        if (alone)
            to[d] = buffer[d];
        else
            std::memcpy((uint16_t*)(to + d) + half, buffer + d, 2);
    }
}

}  // namespace

int64_t store_floats(const CacheLayer& c) {
    return 5 * (std::max(c.D, c.Dv) + 16);
}

void store_rows(const Program& p, const Step& s, const Instruction& in, int64_t first, int64_t count,
                float* memory) {
    const CacheLayer& c = p.layers[in.i[0]];
    const int64_t size = std::max(c.D, c.Dv) + 16;
    float *k_memory = memory, *v_memory = memory + size, *next_memory = memory + 2 * size;
    void* buffer = memory + 3 * size;
    for (int64_t row = first; row < first + count; row++) {
        const int64_t position = s.positions[row], place = position % T, sequence = s.sequence_of[row];
        uint32_t* block = block_of(c, s, sequence, position / T);
        const bool last = position == s.newest[sequence];
        const bool two = p.cache == Cache::bf16 && place % 2 == 0 && row + 1 < first + count &&
                         s.sequence_of[row + 1] == sequence && s.positions[row + 1] == position + 1;
        for (int64_t h = 0; h < c.heads; h++) {
            const Head head(c, block, h);
            const auto k_of = [&](int64_t r) {
                return neighbours(row_of(in.a, r, h), in.a.s1, c.D, k_memory);
            };
            const float* k = k_of(row);
            const float* v = neighbours(row_of(in.b, row, h), in.b.s1, c.Dv, v_memory);
            if (p.cache == Cache::bytes) {
                store_bytes(c, block, h, place, k, v, (int8_t*)buffer);
            } else if (p.cache == Cache::bf16) {
                store_pairs(c, head.k + place, k, (uint16_t*)buffer);
                uint32_t* to = head.v + place / 2 * c.dv_pad;
                if (two) {
                    store_pairs(c, head.k + place + 1, k_of(row + 1), (uint16_t*)buffer);
                    store_two(c, to, v, neighbours(row_of(in.b, row + 1, h), in.b.s1, c.Dv, next_memory));
                } else {
                    store_one(c, to, v, place % 2, place % 2 == 0 && last, (uint16_t*)buffer);
                }
            } else {
                for (int64_t d = 0; d < c.D; d++) std::memcpy(head.k + d * T + place, k + d, 4);
                std::memcpy(head.v + place * c.dv_pad, v, size_t(c.Dv) * 4);
            }
        }
        row += two;
    }
}

}  // namespace hasten
