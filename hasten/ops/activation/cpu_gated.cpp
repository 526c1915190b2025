// Gated activations (Shazeer 2020), one pass over memory each way: kind(x) is rounded to its type before it
// is multiplied, and the backward pass rebuilds it.
#include "kinds.h"

namespace hasten {
namespace {

void forward(const Activation& a, int64_t item) {
    with_kind_and_type(a, [&](auto kind, auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        each_row(a, item, [&](int64_t r, int64_t c, int64_t n) {
            const T *x = (const T*)a.x + r * a.x_n + c, *up = (const T*)a.up + r * a.up_n + c;
            T* y = (T*)a.y + r * a.K + c;
            each_vector(n, [&](int64_t i, auto lanes) {
                const VF value = decltype(kind)::of(get(x + i, lanes)).value;
                put(y + i, rounded_to<T>(value) * get(up + i, lanes), lanes);
            });
        });
    });
}

// dy, and with it dup or dx, may lie over one another: a vector is read before it is written.
void backward(const Activation& a, int64_t item) {
    with_kind_and_type(a, [&](auto kind, auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        each_row(a, item, [&](int64_t r, int64_t c, int64_t n) {
            const T *x = (const T*)a.x + r * a.x_n + c, *up = (const T*)a.up + r * a.up_n + c,
                    *dy = (const T*)a.dy + r * a.dy_n + c;
            const int64_t at = r * a.K + c;
            T *dx = (T*)a.dx + at, *dup = (T*)a.dup + at, *y = a.y ? (T*)a.y + at : nullptr;
            each_vector(n, [&](int64_t i, auto lanes) {
                const Pair both = decltype(kind)::of(get(x + i, lanes));
                const VF value = rounded_to<T>(both.value), u = get(up + i, lanes), d = get(dy + i, lanes);
                put(dx + i, d * u * both.slope, lanes);
                put(dup + i, d * value, lanes);
                if (y) put(y + i, value * u, lanes);
            });
        });
    });
}

}  // namespace

void gated_activation_kernels(Kernels& table) {
    table.gated_activation = forward;
    table.gated_activation_backward = backward;
}

}  // namespace hasten
