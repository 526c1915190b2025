// Tokens drawn from rows of logits, on torch tensors; rows are spread over the threads.
#include "../_cpu/binding.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "binding.h"
#include "cpu.h"

namespace hasten {
namespace {

using at::Tensor;

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

double number(int64_t word) {
    double value;
    std::memcpy(&value, &word, 8);
    return value;
}

void check_logits(const char* name, const Tensor& logits) {
    TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous() &&
                    logits.size(1) > 0 && logits.size(1) < INT32_MAX,
                name, " takes contiguous float32 logits [rows, vocabulary], got ", logits.scalar_type(), " ",
                logits.sizes());
}

void check_row(const char* name, int64_t row, const Tensor& logits) {
    TORCH_CHECK_INDEX(row >= 0 && row < logits.size(0), name, ": row ", row, " of ", logits.size(0));
}

void check_list(const char* what, const Tensor& t, at::ScalarType type) {
    TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type, "sample: ", what, " is contiguous ", type,
                ", got ", t.scalar_type(), " ", t.sizes());
}

// Every step-th of n ids names a token.
void check_ids(const char* what, const int32_t* ids, int64_t n, int64_t step, int64_t V) {
    bool inside = true;
    for (int64_t i = 0; i < n; i++) inside &= uint32_t(ids[i * step]) < uint32_t(V);
    TORCH_CHECK_INDEX(inside, "sample: a token in ", what, " is outside [0, ", V, ")");
}

}  // namespace

bool argmax_rows(const Tensor& logits, at::IntArrayRef rows, int64_t* tokens) {
    const int64_t L = int64_t(rows.size()), V = logits.size(1);
    const int64_t size = (V + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
    const Tensor scratch = at::empty({slots(L), size}, logits.options());
    const float* from = logits.const_data_ptr<float>();
    float* base = scratch.data_ptr<float>();
    const Kernels& kernels = *level().kernels;
    spread(L, [&](int64_t item, int64_t slot) {
        tokens[item] = kernels.argmax(from + rows[item] * V, V, base + slot * size);
    });
    return std::all_of(tokens, tokens + L, [](int64_t token) { return token >= 0; });
}

namespace {

// logits [R, V]; the index of the largest of each row asked for [L]; see argmax_rows.
Tensor argmax(const Tensor& logits, at::IntArrayRef rows) {
    check_logits("argmax", logits);
    for (int64_t row : rows) check_row("argmax", row, logits);
    Tensor tokens = at::empty({int64_t(rows.size())}, logits.options().dtype(at::kLong));
    argmax_rows(logits, rows, tokens.data_ptr<int64_t>());
    return tokens;
}

// What one row of the table asks for.
Sampling row_of(const int64_t* words, const Tensor& logits, at::TensorList histories, at::TensorList bias_ids,
                at::TensorList bias_values, at::TensorList masks) {
    Sampling a{};
    const int64_t V = a.V = logits.size(1);
    check_row("sample", words[ROW], logits);
    a.logits = logits.const_data_ptr<float>() + words[ROW] * V;
    a.seed = uint64_t(words[SEED]), a.position = uint64_t(words[POSITION]);
    a.top_k = words[TOP_K];
    a.temperature = number(words[TEMPERATURE]);
    a.top_p = number(words[TOP_P]), a.min_p = number(words[MIN_P]);
    a.repetition = number(words[REPETITION]);
    a.presence = number(words[PRESENCE]), a.frequency = number(words[FREQUENCY]);
    a.logprob = words[TOP] >= 0;
    a.top = std::max<int64_t>(0, words[TOP]);
    TORCH_CHECK(a.top <= MOST_TOP, "sample: the most likely ", a.top, " tokens are wanted of at most ",
                MOST_TOP);
    if (words[HISTORY] >= 0) {
        const Tensor& t = histories[words[HISTORY]];
        check_list("a history", t, at::kInt);
        a.history = t.const_data_ptr<int32_t>(), a.history_size = words[HISTORY_SIZE];
        TORCH_CHECK(a.history_size >= 0 && 2 * a.history_size <= t.numel(), "sample: a history of ",
                    a.history_size, " pairs in ", t.numel(), " numbers");
        check_ids("a history", a.history, a.history_size, 2, V);
    }
    if (words[BIAS] >= 0) {
        const Tensor &ids = bias_ids[words[BIAS]], &values = bias_values[words[BIAS]];
        check_list("a bias's tokens", ids, at::kInt);
        check_list("a bias", values, at::kFloat);
        TORCH_CHECK(ids.numel() == values.numel(), "sample: ", values.numel(), " biases for ", ids.numel(),
                    " tokens");
        a.bias_ids = ids.const_data_ptr<int32_t>(), a.bias_values = values.const_data_ptr<float>();
        a.bias_size = ids.numel();
        check_ids("a bias", a.bias_ids, a.bias_size, 1, V);
    }
    if (words[MASK] >= 0) {
        const Tensor& t = masks[words[MASK]];
        check_list("a mask", t, at::kInt);
        TORCH_CHECK(t.numel() == (V + 31) / 32, "sample: a mask of ", t.numel(), " words for ", V, " tokens");
        a.mask = (const uint32_t*)t.const_data_ptr<int32_t>();
    }
    return a;
}

// logits [R, V], table [L, COLUMNS] -> tokens [L], log-probabilities [L, 1 + n] of the token and of the n
// most likely ones (n the most that a row wants, [L, 0] if none wants any), those [L, n], and, if asked for,
// the probabilities [L, V] that the tokens were drawn from. A token of -1 or -2: see `argmax`.
std::tuple<Tensor, Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& table,
                                                  at::TensorList histories, at::TensorList bias_ids,
                                                  at::TensorList bias_values, at::TensorList masks,
                                                  bool probabilities) {
    check_logits("sample", logits);
    TORCH_CHECK(table.dim() == 2 && table.size(1) == COLUMNS && table.scalar_type() == at::kLong &&
                    table.is_contiguous(),
                "sample takes a contiguous int64 table [rows, ", int64_t(COLUMNS), "], got ",
                table.scalar_type(), " ", table.sizes());
    TORCH_CHECK(bias_ids.size() == bias_values.size(), "sample: ", bias_values.size(), " biases for ",
                bias_ids.size(), " lists of tokens");
    const int64_t L = table.size(0), V = logits.size(1);
    const int64_t* words = table.const_data_ptr<int64_t>();
    int64_t top = -1;
    for (int64_t i = 0; i < L; i++) {
        const int64_t* row = words + i * COLUMNS;
        top = std::max(top, row[TOP]);
        TORCH_CHECK_INDEX(row[HISTORY] < int64_t(histories.size()) && row[BIAS] < int64_t(bias_ids.size()) &&
                              row[MASK] < int64_t(masks.size()),
                          "sample: row ", i, " of the table names a list that is not given");
    }
    const auto integers = table.options(), floats = logits.options();
    Tensor tokens = at::empty({L}, integers);
    Tensor logprobs = at::empty({L, 1 + top}, floats);
    Tensor top_tokens = at::empty({L, std::max<int64_t>(0, top)}, integers);
    Tensor drawn_from = at::empty({probabilities ? L : 0, V}, floats);
    std::vector<Sampling> work(L);
    for (int64_t i = 0; i < L; i++) {
        Sampling& a = work[i] = row_of(words + i * COLUMNS, logits, histories, bias_ids, bias_values, masks);
        a.token = tokens.data_ptr<int64_t>() + i;
        a.logprobs = logprobs.data_ptr<float>() + i * (1 + top);
        a.top_tokens = top_tokens.data_ptr<int64_t>() + i * std::max<int64_t>(0, top);
        if (probabilities) a.probabilities = drawn_from.data_ptr<float>() + i * V;
    }
    const int64_t size = sampling_scratch(V);
    const Tensor scratch = at::empty({slots(L), size}, floats);
    float* base = scratch.data_ptr<float>();
    const Kernels& kernels = *level().kernels;
    spread(L, [&](int64_t item, int64_t slot) { kernels.sample(work[item], base + slot * size); });
    return {tokens, logprobs, top_tokens, drawn_from};
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def("argmax(Tensor logits, int[] rows) -> Tensor");
    m.def(
        "sample(Tensor logits, Tensor table, Tensor[] histories, Tensor[] bias_ids, Tensor[] bias_values, "
        "Tensor[] masks, bool probabilities) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("argmax", hasten::argmax);
    m.impl("sample", hasten::sample);
}
