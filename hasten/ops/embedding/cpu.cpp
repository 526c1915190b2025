// The gradient of an embedding's table: each item writes its rows of the table once, zeros included.
#include <algorithm>

#include "../_cpu/kernels.h"
#include "../_cpu/vec.h"

namespace hasten {
namespace {

constexpr int64_t BLOCK = 1024;

// dweight[row] columns [c0, c0 + n): the gradients of the tokens at places [at, end), added in order.
template <class G, class T>
void one_block(const EmbeddingGradient& a, int64_t row, int64_t at, int64_t end, int64_t c0, int64_t n) {
    float sums[BLOCK] = {};
    const int64_t whole = n / W * W;
    const int rest = int(n - whole);
    for (; at < end; at++) {
        const G* from = (const G*)a.grad + a.places[at] * a.H + c0;
        for (int64_t c = 0; c < whole; c += W)
            store(sums + c, load(sums + c) + load_float(from + c) * a.scale);
        if (rest) store(sums + whole, load(sums + whole) + load_part(from + whole, rest) * a.scale);
    }
    T* to = (T*)a.dweight + row * a.H + c0;
    for (int64_t c = 0; c < whole; c += W) store_float(to + c, load(sums + c));
    if (rest) store_part(to + whole, load(sums + whole), rest);
}

template <class G, class T>
void table_rows(const EmbeddingGradient& a, int64_t item) {
    const int64_t first = item * a.item_rows, last = std::min(a.rows, first + a.item_rows), H = a.H;
    int64_t at = 0;
    for (int64_t high = a.tokens; at < high;) {  // the first id of this item's rows
        const int64_t middle = (at + high) / 2;
        if (a.ids[middle] < first)
            at = middle + 1;
        else
            high = middle;
    }
    // Few rows of a table have a token: all are cleared at once, which does not read them first.
    std::memset((char*)a.dweight + first * H * int64_t(sizeof(T)), 0, size_t((last - first) * H) * sizeof(T));
    while (at < a.tokens && a.ids[at] < last) {
        const int64_t row = a.ids[at];
        int64_t end = at;
        while (end < a.tokens && a.ids[end] == row) end++;
        if (row != a.padding_idx)
            for (int64_t c = 0; c < H; c += BLOCK)
                one_block<G, T>(a, row, at, end, c, std::min(BLOCK, H - c));
        at = end;
    }
}

template <class G>
void rows_from(const EmbeddingGradient& a, int64_t item) {
    if (a.type == Type::f32) return table_rows<G, float>(a, item);
    if (a.type == Type::bf16) return table_rows<G, bf16>(a, item);
    table_rows<G, f16>(a, item);
}

void embedding_backward(const EmbeddingGradient& a, int64_t item) {
    if (a.grad_type == Type::f32) return rows_from<float>(a, item);
    if (a.grad_type == Type::bf16) return rows_from<bf16>(a, item);
    rows_from<f16>(a, item);
}

}  // namespace

void embedding_kernels(Kernels& table) {
    table.embedding_backward = embedding_backward;
}

}  // namespace hasten
