// What the torch side of the operators shares: how items are spread over torch's threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "chosen.h"

namespace hasten {

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
        release_brgemm();
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
