// Tokens drawn from rows of logits, spread over the threads.
#include "serving.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../_cpu/serving.h"
#include "cpu.h"

namespace hasten {
namespace {

// The 64-bit words of a table's row, as __init__.py names them; from TEMPERATURE on they are bits of a
// double.
enum Column : int64_t {
    ROW,
    SEED,
    POSITION,
    TOP_K,
    HISTORY,
    HISTORY_SIZE,
    BIAS,
    MASK,
    TOP,
    TEMPERATURE,
    TOP_P,
    MIN_P,
    REPETITION,
    PRESENCE,
    FREQUENCY,
    COLUMNS
};
// The kernel sorts so many at most.
constexpr int64_t MOST_TOP = 256;

// Arrays that rows of a table name; [n] of each kind. A history has pairs, a bias tokens and values.
struct Lists {
    int64_t histories, biases, masks;
    const int32_t* const* history;
    const int64_t* history_size;  // pairs
    const int32_t* const* bias_ids;
    const float* const* bias_values;
    const int64_t* bias_size;
    const int32_t* const* mask;  // [ceil(V / 32)]
};

double number(int64_t word) {
    double value;
    std::memcpy(&value, &word, 8);
    return value;
}

void check_row(const char* name, int64_t row, int64_t R) {
    check<std::out_of_range>(row >= 0 && row < R, name, ": row ", row, " of ", R);
}

// Every step-th of n ids names a token.
void check_ids(const char* what, const int32_t* ids, int64_t n, int64_t step, int64_t V) {
    bool inside = true;
    for (int64_t i = 0; i < n; i++) inside &= uint32_t(ids[i * step]) < uint32_t(V);
    check<std::out_of_range>(inside, "sample: a token in ", what, " is outside [0, ", V, ")");
}

struct Freed {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};

// f(item, scratch) for every item, with `floats` of working memory.
template <class F>
void spread(int64_t items, int threads, int64_t floats, const F& f) {
    if (items == 0) return;
    threads = int(std::min<int64_t>(threads, items));
    floats = (floats + 15) / 16 * 16;
    const std::unique_ptr<float[], Freed> scratch(new (std::align_val_t(64)) float[threads * floats]);
    std::atomic<int64_t> next{0};
    together(threads, [&](int thread, int) {
        for (int64_t item = next++; item < items; item = next++) f(item, scratch.get() + thread * floats);
    });
}

}  // namespace

bool argmax_rows(const float* logits, int64_t V, const int64_t* rows, int64_t L, int threads,
                 int64_t* tokens) {
    const Kernels& kernels = *level().kernels;
    spread(L, threads, (V + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK, [&](int64_t item, float* scratch) {
        tokens[item] = kernels.argmax(logits + rows[item] * V, V, scratch);
    });
    return std::all_of(tokens, tokens + L, [](int64_t token) { return token >= 0; });
}

namespace {

// What one row of the table asks for.
Sampling row_of(const int64_t* words, const float* logits, int64_t R, int64_t V, const Lists& lists) {
    Sampling a{};
    a.V = V;
    check_row("sample", words[ROW], R);
    a.logits = logits + words[ROW] * V;
    a.seed = uint64_t(words[SEED]), a.position = uint64_t(words[POSITION]);
    a.top_k = words[TOP_K];
    a.temperature = number(words[TEMPERATURE]);
    a.top_p = number(words[TOP_P]), a.min_p = number(words[MIN_P]);
    a.repetition = number(words[REPETITION]);
    a.presence = number(words[PRESENCE]), a.frequency = number(words[FREQUENCY]);
    a.logprob = words[TOP] >= 0;
    a.top = std::max<int64_t>(0, words[TOP]);
    check(a.top <= MOST_TOP, "sample: the most likely ", a.top, " tokens are wanted of at most ", MOST_TOP);
    if (const int64_t i = words[HISTORY]; i >= 0) {
        a.history = lists.history[i], a.history_size = words[HISTORY_SIZE];
        check(a.history_size >= 0 && a.history_size <= lists.history_size[i], "sample: a history of ",
              a.history_size, " pairs in ", 2 * lists.history_size[i], " numbers");
        check_ids("a history", a.history, a.history_size, 2, V);
    }
    if (const int64_t i = words[BIAS]; i >= 0) {
        a.bias_ids = lists.bias_ids[i], a.bias_values = lists.bias_values[i];
        a.bias_size = lists.bias_size[i];
        check_ids("a bias", a.bias_ids, a.bias_size, 1, V);
    }
    if (words[MASK] >= 0) a.mask = (const uint32_t*)lists.mask[words[MASK]];
    return a;
}

}  // namespace
}  // namespace hasten

using namespace hasten;

// logits [R, V]; tokens [L]: the index of the largest of each row asked for [L]; see argmax_rows.
HASTEN_DOOR Answer hasten_argmax(const float* logits, int64_t R, int64_t V, const int64_t* rows, int64_t L,
                                 int64_t threads, int64_t* tokens) {
    return guarded([&] {
        for (int64_t i = 0; i < L; i++) check_row("argmax", rows[i], R);
        argmax_rows(logits, V, rows, L, int(threads), tokens);
    });
}

// logits [R, V], table [L, COLUMNS] -> tokens [L], log-probabilities [L, 1 + top] of the token and of the
// most likely ones, those [L, top], and the probabilities [L, V] that the tokens were drawn from, or null.
// `top` is the most that a row wants, -1 if none wants any. A token of -1 or -2: see argmax_rows.
HASTEN_DOOR Answer hasten_sample(const float* logits, int64_t R, int64_t V, const int64_t* table, int64_t L,
                                 const Lists& lists, int64_t top, int64_t threads, int64_t* tokens,
                                 float* logprobs, int64_t* top_tokens, float* probabilities) {
    return guarded([&] {
        std::vector<Sampling> work(L);
        for (int64_t i = 0; i < L; i++) {
            const int64_t* row = table + i * COLUMNS;
            check<std::out_of_range>(
                row[HISTORY] < lists.histories && row[BIAS] < lists.biases && row[MASK] < lists.masks,
                "sample: row ", i, " of the table names a list that is not given");
            check(row[TOP] <= top, "sample: row ", i, " wants the most likely ", row[TOP], " tokens of ",
                  top);
            Sampling& a = work[i] = row_of(row, logits, R, V, lists);
            a.token = tokens + i;
            a.logprobs = logprobs + i * (1 + top);
            a.top_tokens = top_tokens + i * std::max<int64_t>(0, top);
            if (probabilities) a.probabilities = probabilities + i * V;
        }
        const Kernels& kernels = *level().kernels;
        spread(L, int(threads), sampling_scratch(V),
               [&](int64_t item, float* scratch) { kernels.sample(work[item], scratch); });
    });
}
