// What the torch side of the operators shares: the chosen level and how items are spread over torch's
// threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>

#include "kernels.h"

namespace hasten {

struct Level {
    const Kernels* kernels = nullptr;
    bool bf16 = false;        // the processor multiplies pairs of bf16
    Brgemm brgemm = nullptr;  // where it has AMX
    int64_t l2_bytes = 1 << 20;
    bool vnni = false;  // the processor multiplies quads of bytes
};

const Level& level();

// The level's brgemm, or null where torch would refuse it now: oneDNN is switched off, or limited to a level
// below (ONEDNN_MAX_CPU_ISA). The pairs of bf16 then do the work.
Brgemm usable_brgemm();

void release_brgemm();

// How often work was spread: tells whether a kernel or a torch body answered a call.
extern std::atomic<int64_t> launches;

// f(item, slot) for every item; items are taken one by one, slots are below `slots(items)` and never shared.
inline int64_t slots(int64_t items) {
    return std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), items));
}

template <class F>
void spread(int64_t items, const F& f) {
    launches.fetch_add(1, std::memory_order_relaxed);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, slots(items), 1, [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; slot++)
            for (int64_t item = next++; item < items; item = next++) f(item, slot);
        if (level().brgemm) release_brgemm();
    });
}

inline Type type_of(at::ScalarType type) {
    switch (type) {
        case at::kFloat:
            return Type::f32;
        case at::kBFloat16:
            return Type::bf16;
        case at::kHalf:
            return Type::f16;
        default:
            TORCH_CHECK(false, "hasten_cpu takes float32, bfloat16 or float16, got ", type);
    }
}
inline Type type_of(const at::Tensor& t) {
    return type_of(t.scalar_type());
}

}  // namespace hasten
