// A decoder as a list of instructions over rows of floats, one row a token; see docs/design/003-serving.md.
//
// An instruction is cut into units of work (rows, panels of a matrix, or heads of a sequence); a thread takes
// a run of neighbouring units, or what its share says. The caller puts barriers between instructions and
// calls `program_run` from every thread of one parallel region.
#pragma once

#include <algorithm>

#include "../_cpu/kernels.h"

namespace hasten {

constexpr int64_t BLOCK_TOKENS = 32;
// Where each sequence has one row, its keys are shared out in parts of so many blocks.
constexpr int64_t PART_BLOCKS = 4;

// In the order of `OPCODES` in serve/program.py.
enum class Op : int64_t {
    embed,    // dst = row `token` of the matrix * f[0]
    norm,     // dst = norm(a [n0, n1]) * (b + f[1]) [+ c]; i[0]: 0 RMS, 1 layer; f[0] = eps
    prepare,  // rows of a made ready for the products with the matrix
    linear,   // dst = f[0] * kind(a W^T + bias) [* (a Up^T + bias)] [+ c]; i[0] = kind, -1 none
    rotary,   // dst [n0, n1] = a with its first i[0] dims turned by b = cos, c = sin; i[1]: interleaved
    store,    // a [n0, n1] and b [n0, i[1]] become the key and the value of the row in cache layer i[0]
    attend,   // dst [n0, i[1]] = attention of a [n0, n1] over cache layer i[0]; see attention.h
    merge,    // joins what `attend` left in parts; the same fields
    binary,   // dst [n0, n1] = a (i[0]) b; i[0]: the place in `BINARY` of codes.py
    unary,    // dst [n0, n1] = kind(a * f[0] + f[1]); i[0] = kind, -1 none, from 32 on `FUNCTIONS`
    gated,    // dst [n0, n1] = kind(a) * b; i[0] = kind
    select,   // row l of dst = row wanted[l] of a
    where,    // dst [n0, n1] = a is not 0 ? b : c
    reduce,   // dst [n0] = f[0] * (i[0]) over n1 of a [n0, n1]: 0 sum, 1 largest, 2 smallest
    softmax,  // dst [n0, n1] = softmax over n1 of a
    places,   // dst [n0, i[0]] = places of the largest (i[1] = 0: smallest) of a [n0, n1], in falling order
    gather,   // dst [n0, n1] = a [n0, b]; b [n0, n1] are places
    scatter,  // dst [n0, a] = b; a, b [n0, n1]: places and values
    experts,  // dst [n0, i[0]] = a [n0, n1] times the matrix of expert b [n0] of i[1], plus its bias
};

// Element (row, i, j) lies at base + row * row_stride + i * s0 + j * s1; `by` says what counts as the row.
struct Operand {
    float* base;
    int64_t row_stride, s0, s1;
    int64_t by;  // 0: the row, 1: the row's position, 2: nothing, one vector for all rows
};

// How a step is run, in the order of `WAYS` in serve/sharing.py, which says what each is for.
enum class Way : int64_t { few, many, own };

// Who does what of an instruction, as `Share` there.
enum class Share : int64_t { parts, each, rows };

struct Instruction {
    Op op;
    int64_t meet;  // whether all threads do before it
    Share share;
    int64_t selected;  // its rows are the wanted ones
    int64_t n0, n1;
    Operand dst, a, b, c, d;
    int64_t matrix, up;  // -1: none
    int64_t i[8];
    double f[4];
};

// What keys and values are stored as.
enum class Cache : int64_t { floats, bf16, bytes };

// Where the keys and values of one layer lie: a block holds for each KV head K [D units, 32] and V
// [32 / per_unit units, Dv padded], a unit being a pair of bf16 or one float. Bytes lie as bf16 would, with
// two scales for each token behind them; see Bytes in cache.h. Blocks lie `block_units` apart,
// heads `head_units`, of four bytes.
struct CacheLayer {
    uint32_t* base;
    int64_t block_units, heads, D, Dv, d_units, dv_pad, group, head_units;
};

// Rows [first, first + rows) of a step, neighbours in a sequence, whose queries are multiplied together.
struct QueryTile {
    int32_t sequence, first, rows;
};

struct Step {
    int64_t rows, sequences, wanted_rows;
    const int32_t *tokens, *positions, *wanted;
    const int32_t* const* tables;  // of each group: [sequences, table_width[group]]
    const int64_t* table_width;
    const int32_t* sequence_of;  // of each row
    const int32_t* newest;       // of each sequence: its last position
    // Attention: tiles of queries, of at most tile_tokens rows; parts of a sequence's keys.
    const QueryTile* query_tiles;
    int64_t tiles, tile_tokens, parts;
};

struct Matrix;
struct Program {
    const Kernels* kernels;
    const Instruction* instructions;
    int64_t count;
    const Matrix* matrices;
    const CacheLayer* layers;
    Cache cache;
    bool bf16, vnni;
    Brgemm brgemm;
    int64_t few;           // most rows that each thread makes ready for itself
    void* prepared;        // by `prepare`, for all threads
    int64_t prepared_row;  // bytes of a row, at most
    float* partial;        // of attention in parts
};

// Rows of a tile of products: where threads take rows of their own, whole tiles.
constexpr int64_t OWN_TILE = 8;
// Fewest rows of each thread for which it reads all weights itself: reading is then a small part of the work,
// and tiles are dealt evenly enough.
constexpr int64_t OWN_ROWS = 128;

// Units of what is done along rows: rows, or tiles of them where threads have rows of their own.
inline int64_t row_units(const Instruction& in, int64_t rows) {
    return in.share == Share::rows ? (rows + OWN_TILE - 1) / OWN_TILE : rows;
}
struct RowRange {
    int64_t first, count;
};
inline RowRange rows_of_units(const Instruction& in, int64_t rows, int64_t first, int64_t count) {
    if (in.share != Share::rows) return {first, count};
    first *= OWN_TILE;
    return {first, std::min(count * OWN_TILE, rows - first)};
}

// Instructions along the numbers of one row (cpu_along.cpp).
void program_along(const Step& s, const Instruction& in, int64_t row);
// `unary` with one of `FUNCTIONS`: y[j] = function(x[j * stride] * factor + added) for n values.
void program_function(int64_t function, const float* x, int64_t stride, float factor, float added, int64_t n,
                      float* y);

// Products with the matrices of experts (cpu_experts.cpp): a unit is a panel of one that a row has chosen.
int64_t experts_units(const Program& p, const Step& s, const Instruction& in);
int64_t experts_scratch(const Program& p, const Step& s, const Instruction& in);
void experts_run(const Program& p, const Step& s, const Instruction& in, int64_t first, int64_t count,
                 void* scratch);

}  // namespace hasten
