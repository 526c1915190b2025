// What steps of a program need of sampling.
#pragma once

#include <ATen/core/Tensor.h>

namespace hasten {

// The index of the largest of each row of logits [R, V] that is asked for [L], the lowest at ties: -1 for a
// row with NaN or +infinity, -2 for one of -infinity alone. Returns whether all are tokens.
bool argmax_rows(const at::Tensor& logits, at::IntArrayRef rows, int64_t* tokens);

}  // namespace hasten
