// A row of any element type as a row of floats and back. The kernels over rows compute on floats that live in
// the first-level cache, so one body serves every mix of types.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace hasten {
namespace {

// How many of a vector's lanes hold elements: all, known when compiled, or the rest of a row.
struct Full {
    constexpr operator int() const { return W; }
};

// f(i, lanes) for each vector of a row of n elements.
template <class F>
inline void each_vector(int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, Full{});
    if (i < n) f(i, int(n - i));
}

template <class T>
inline VF get(const T* p, Full) {
    return load_float(p);
}
template <class T>
inline VF get(const T* p, int lanes) {
    return load_part(p, lanes);
}
template <class T>
inline void put(T* p, VF v, Full) {
    store_float(p, v);
}
template <class T>
inline void put(T* p, VF v, int lanes) {
    store_part(p, v, lanes);
}

// v with zeros behind the lanes in use.
inline VF keep(VF v, Full) {
    return v;
}
inline VF keep(VF v, int lanes) {
    return lane_numbers() < lanes ? v : VF{};
}

// v, rounded: keeps the compiler from joining a product with the sum that follows.
inline VF apart(VF v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    volatile VF kept = v;
    v = kept;
#endif
    return v;
}

// The sum of f(i, lanes), which must be zero in lanes that are not in use, over a row.
template <class F>
inline float sum_over(int64_t n, const F& f) {
    VF a{}, b{}, c{}, d{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        a = a + f(i, Full{});
        b = b + f(i + W, Full{});
        c = c + f(i + 2 * W, Full{});
        d = d + f(i + 3 * W, Full{});
    }
    for (; i + W <= n; i += W) a = a + f(i, Full{});
    if (i < n) b = b + f(i, int(n - i));
    return sum((a + b) + (c + d));
}

// Calls f with a null pointer of the element type, and returns what it does.
template <class F>
inline auto with_type(Type type, const F& f) {
    switch (type) {
        case Type::bf16:
            return f((bf16*)nullptr);
        case Type::f16:
            return f((f16*)nullptr);
        default:
            return f((float*)nullptr);
    }
}

inline int64_t size_of(Type type) {
    return type == Type::f32 ? 4 : 2;
}
// Element i of an array of the type.
inline void* at(Type type, void* p, int64_t i) {
    return (char*)p + i * size_of(type);
}
inline const void* at(Type type, const void* p, int64_t i) {
    return (const char*)p + i * size_of(type);
}

// n elements as floats: the array itself if it holds floats, else `buffer`, filled.
inline const float* as_floats(Type type, const void* p, int64_t n, float* buffer) {
    if (type == Type::f32) return (const float*)p;
    with_type(type, [&](auto* t) {
        const auto* from = (decltype(t))p;
        each_vector(n, [&](int64_t i, auto lanes) { put(buffer + i, get(from + i, lanes), lanes); });
    });
    return buffer;
}

inline void write_floats(Type type, void* p, const float* row, int64_t n) {
    with_type(type, [&](auto* t) {
        auto* to = (decltype(t))p;
        each_vector(n, [&](int64_t i, auto lanes) { put(to + i, get(row + i, lanes), lanes); });
    });
}

template <class T>
inline VF rounded_to(VF v) {
    if constexpr (std::is_same_v<T, bf16>)
        return rounded_bf16(v);
    else if constexpr (std::is_same_v<T, f16>)
        return widen_f16(narrow_f16(v));
    else
        return v;
}

}  // namespace
}  // namespace hasten
