// What serving.so shares: a plain C door for a caller that has no torch. Arrays come as addresses, and their
// types and sizes were checked by the caller.
#pragma once

#include <omp.h>

#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "chosen.h"

// Changes with what callers hand over as words; see LAYOUT in ops/level.py.
constexpr int32_t HASTEN_LAYOUT = 1;

#define HASTEN_DOOR extern "C" __attribute__((visibility("default")))

namespace hasten {

// Raises E with the parts as its message.
template <class E = std::runtime_error, class... Parts>
void check(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream message;
    (message << ... << parts);
    throw E(message.str());
}

// What a door returns; the caller raises the same, with `hasten_error()`.
enum class Answer : int32_t { done, runtime_error, index_error, memory_error };

// Keeps the message of what f raises.
Answer failed(Answer what, const char* message);
template <class F>
Answer guarded(const F& f) {
    try {
        f();
        return Answer::done;
    } catch (const std::out_of_range& error) {
        return failed(Answer::index_error, error.what());
    } catch (const std::bad_alloc&) {
        return failed(Answer::memory_error, "the system has no memory left");
    } catch (const std::exception& error) {
        return failed(Answer::runtime_error, error.what());
    }
}

// f(thread, threads) from each of at most `threads` threads: fewer where the runtime gives no more.
template <class F>
void together(int threads, const F& f) {
    launches.fetch_add(1, std::memory_order_relaxed);
    if (threads == 1) return f(0, 1);
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace hasten
