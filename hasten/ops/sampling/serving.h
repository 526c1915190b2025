// What steps of a program need of sampling.
#pragma once

#include <cstdint>

namespace hasten {

// The index of the largest of each of L rows of logits [R, V] that are asked for, the lowest at ties: -1 for
// a row with NaN or +infinity, -2 for one of -infinity alone. Returns whether all are tokens.
bool argmax_rows(const float* logits, int64_t V, const int64_t* rows, int64_t L, int threads,
                 int64_t* tokens);

}  // namespace hasten
