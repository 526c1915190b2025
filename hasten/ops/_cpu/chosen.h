// The level whose kernels a library runs. binding.so, which knows torch, and serving.so, which does not, hold
// one each.
#pragma once

#include <atomic>

#include "kernels.h"

namespace hasten {

struct Level {
    const Kernels* kernels = nullptr;
    bool bf16 = false;  // the processor multiplies pairs of bf16
    int64_t l2_bytes = 1 << 20;
    bool vnni = false;  // the processor multiplies quads of bytes
    // Where it has AMX: torch's product, or null where torch would refuse it now; and what a thread calls
    // that has used it.
    Brgemm (*brgemm)() = nullptr;
    void (*release)() = nullptr;
};

// Raises std::runtime_error where none is loaded.
const Level& level();

// Loads the library of a level, which stays loaded: its table is in use for the life of the process. Raises
// std::runtime_error where it is none.
void choose(const char* path, Level with);

// What a level with AMX needs of torch, to a library that has loaded the level without it.
void lend(Brgemm (*brgemm)(), void (*release)());

inline Brgemm usable_brgemm() {
    return level().brgemm ? level().brgemm() : nullptr;
}
inline void release_brgemm() {
    if (level().release) level().release();
}

// How often work was spread: tells whether a kernel or a torch body answered a call.
extern std::atomic<int64_t> launches;

}  // namespace hasten
