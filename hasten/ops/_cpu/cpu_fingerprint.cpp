// A number that changes with any byte of a buffer, at the speed of memory: lanes of multiply and rotate, each
// over its own words, mixed at the end. It is no cryptographic hash.
#include "kernels.h"
#include "vec.h"

namespace hasten {
namespace {

typedef uint64_t VL __attribute__((vector_size(64)));

inline VL step(VL state, VL words) {
    const VL mixed = (state ^ words) * 0x9e3779b97f4a7c15u;
    return mixed ^ (mixed >> 29);
}

uint64_t fingerprint(const void* data, int64_t bytes) {
    constexpr int LANES = 4;
    VL state[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 8; j++) state[i][j] = uint64_t(i * 8 + j + 1) * 0xd1b54a32d192ed03u;
    const char* at = (const char*)data;
    int64_t left = bytes;
    for (; left >= LANES * 64; left -= LANES * 64, at += LANES * 64)
        for (int i = 0; i < LANES; i++) {
            VL words;
            std::memcpy(&words, at + i * 64, 64);
            state[i] = step(state[i], words);
        }
    for (int i = 0; left > 0; i++, left -= 64, at += 64) {
        VL words{};
        std::memcpy(&words, at, left < 64 ? size_t(left) : 64);
        state[i] = step(state[i], words);
    }
    uint64_t result = uint64_t(bytes);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 8; j++) {
            result = (result ^ state[i][j]) * 0x9e3779b97f4a7c15u;
            result ^= result >> 32;
        }
    return result;
}

}  // namespace

void fingerprint_kernels(Kernels& table) {
    table.fingerprint = fingerprint;
}

}  // namespace hasten
