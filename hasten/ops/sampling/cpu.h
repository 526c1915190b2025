// Drawing a token from a row of logits: what the caller gives and what a kernel writes. See reference.py for
// the meaning.
#pragma once

#include <cstdint>

namespace hasten {

// Logits of a block have their maximum noted: the few blocks that hold the largest logits are then known.
constexpr int64_t SAMPLING_BLOCK = 64;

// What stands in place of a token.
constexpr int64_t NOT_FINITE = -1;  // a logit is NaN or +infinity
constexpr int64_t NONE_LEFT = -2;   // every logit is -infinity, or is so after masks and biases

struct Sampling {
    const float* logits;  // [V]
    int64_t V;
    uint64_t seed, position;     // of the counter-based generator
    double temperature;          // below 1e-5: the largest logit
    int64_t top_k;               // 0: all
    double top_p, min_p;         // 1 and 0: all
    double repetition;           // 1: none
    double presence, frequency;  // 0: none
    const int32_t* history;      // [history_size, 2]: a token seen, and how often in the output
    int64_t history_size;
    const int32_t* bias_ids;
    const float* bias_values;  // [bias_size]
    int64_t bias_size;
    const uint32_t* mask;  // bit i of word i / 32: token i is allowed; or null
    bool logprob;          // of the token is wanted
    int64_t top;           // how many of the most likely tokens are wanted

    int64_t* token;
    float* logprobs;       // [1 + top], if logprob
    int64_t* top_tokens;   // [top]; -1 and -infinity where there are no more
    float* probabilities;  // [V] that the token was drawn from, or null
};

// Floats of working memory for one row.
inline int64_t sampling_scratch(int64_t V) {
    const int64_t blocks = (V + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK, padded = blocks * SAMPLING_BLOCK;
    return 2 * blocks + 5 * padded;
}

}  // namespace hasten
