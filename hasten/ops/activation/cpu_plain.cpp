// Plain activations, one pass over memory each way.
#include "kinds.h"

namespace hasten {
namespace {

void forward(const Activation& a, int64_t item) {
    with_kind_and_type(a, [&](auto kind, auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        each_row(a, item, [&](int64_t r, int64_t c, int64_t n) {
            const T* x = (const T*)a.x + r * a.x_n + c;
            T* y = (T*)a.y + r * a.K + c;
            each_vector(n, [&](int64_t i, auto lanes) {
                put(y + i, decltype(kind)::of(get(x + i, lanes)).value, lanes);
            });
        });
    });
}

void backward(const Activation& a, int64_t item) {
    with_kind_and_type(a, [&](auto kind, auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        each_row(a, item, [&](int64_t r, int64_t c, int64_t n) {
            const T *x = (const T*)a.x + r * a.x_n + c, *dy = (const T*)a.dy + r * a.dy_n + c;
            T* dx = (T*)a.dx + r * a.K + c;
            each_vector(n, [&](int64_t i, auto lanes) {
                put(dx + i, get(dy + i, lanes) * decltype(kind)::of(get(x + i, lanes)).slope, lanes);
            });
        });
    });
}

}  // namespace

void activation_kernels(Kernels& table) {
    table.activation = forward;
    table.activation_backward = backward;
}

}  // namespace hasten
