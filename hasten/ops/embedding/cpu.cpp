// The gradient of an embedding's table: each item writes its rows of the table once, zeros included.
#include <algorithm>

#include "../_cpu/rows.h"

namespace hasten {
namespace {

constexpr int64_t BLOCK = 1024;

// dweight[row] columns [c0, c0 + n): the gradients of the tokens at places [at, end), added in order.
template <class G, class T>
void one_block(const EmbeddingGradient& a, int64_t row, int64_t at, int64_t end, int64_t c0, int64_t n) {
    float sums[BLOCK] = {};
    for (; at < end; at++) {
        const G* from = (const G*)a.grad + a.places[at] * a.H + c0;
        each_vector(n, [&](int64_t c, auto lanes) {
            store(sums + c, load(sums + c) + get(from + c, lanes) * a.scale);
        });
    }
    T* to = (T*)a.dweight + row * a.H + c0;
    each_vector(n, [&](int64_t c, auto lanes) { put(to + c, load(sums + c), lanes); });
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

void embedding_backward(const EmbeddingGradient& a, int64_t item) {
    with_type(a.grad_type, [&](auto* g) {
        with_type(a.type, [&](auto* t) {
            table_rows<std::remove_pointer_t<decltype(g)>, std::remove_pointer_t<decltype(t)>>(a, item);
        });
    });
}

}  // namespace

void embedding_kernels(Kernels& table) {
    table.embedding_backward = embedding_backward;
}

}  // namespace hasten
