// Loads the library of a level for a caller that has no torch.
#include "serving.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hasten {

static thread_local std::string message;

Answer failed(Answer what, const char* text) {
    message = text;
    return what;
}

}  // namespace hasten

using namespace hasten;

HASTEN_DOOR const char* hasten_error() {
    return message.c_str();
}

HASTEN_DOOR int32_t hasten_layout() {
    return HASTEN_LAYOUT;
}

HASTEN_DOOR Answer hasten_load(const char* path, bool bf16, int64_t l2_bytes, bool vnni) {
    return guarded([&] { choose(path, {nullptr, bf16, l2_bytes, vnni}); });
}

// What binding.so's `brgemm` gave.
HASTEN_DOOR Answer hasten_lend(void* brgemm, void* release) {
    return guarded([&] { lend((Brgemm (*)())brgemm, (void (*)())release); });
}

HASTEN_DOOR int64_t hasten_launches() {
    return launches.load();
}

// Reads `count` floats once, a word of each line, each thread a part of them and lines ahead: what reading
// memory costs.
HASTEN_DOOR Answer hasten_read(const char* data, int64_t count, int64_t threads) {
    constexpr int64_t LINE = 64, AHEAD = 6144;
    return guarded([&] {
        std::atomic<uint64_t> found{0};  // so that nothing is left out
        together(int(threads), [&](int thread, int team) {
            const int64_t lines = 4 * count / LINE, last = lines * (thread + 1) / team;
            uint64_t part = 0;
            for (int64_t line = lines * thread / team; line < last; line++) {
                uint64_t word;
                std::memcpy(&word, data + line * LINE, 8);
                __builtin_prefetch(data + line * LINE + AHEAD);
                part |= word;
            }
            found |= part;
        });
    });
}

// XCR0: the register sets that the system saves when it switches threads (Intel SDM, volume 1, 13.1). An
// instruction on a set that it does not save faults, whatever CPUID says of the processor.
HASTEN_DOOR int64_t hasten_saved_registers() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    constexpr unsigned osxsave = 1u << 27;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave)) return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return int64_t(uint64_t(high) << 32 | low);
#else
    return 0;
#endif
}
