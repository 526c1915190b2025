// Runs a program: one parallel region for a step, with a barrier where instructions need one.
#include <ATen/core/Tensor.h>
#include <omp.h>
#include <torch/library.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "../_cpu/binding.h"
#include "../panels/cpu.h"
#include "../sampling/binding.h"
#include "cpu.h"

namespace hasten {
namespace {

static_assert(sizeof(Operand) == 5 * 8 && sizeof(Instruction) == 45 * 8);

// Threads meet here often, for less than a microsecond each time: they spin, and yield where one is late.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait() {
        const int phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
            if (spins > 2000) std::this_thread::yield();
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
    }

  private:
    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
};

bool is_attention(Op op) {
    return op == Op::store || op == Op::attend || op == Op::merge;
}

// What a thread needs beside the arena; kept between steps, since a step takes a millisecond.
char* scratch_of_thread(int64_t bytes) {
    thread_local std::vector<char> memory;
    if (int64_t(memory.size()) < bytes + 64) memory.resize(bytes + 64);
    return (char*)((uintptr_t(memory.data()) + 63) / 64 * 64);
}

// Tiles in an order in which threads that take equal runs of them get equal work: the tiles of a sequence
// grow with their place in it.
std::vector<QueryTile> dealt(const std::vector<QueryTile>& tiles, int64_t hands) {
    const int64_t count = int64_t(tiles.size());
    std::vector<QueryTile> found;
    for (int64_t hand = 0; hand < hands; hand++)
        for (int64_t round = 0; round * hands < count; round++) {
            const int64_t i = round * hands + (round % 2 ? hands - 1 - hand : hand);
            if (i < count) found.push_back(tiles[i]);
        }
    return found;
}

// The rows of a step in another order.
struct Reordered {
    std::vector<int32_t> tokens, positions, sequence_of, wanted;

    // That of the tiles, whose first rows become those of this order: threads whose rows are their own have
    // nearly all tiles of these rows, too.
    Reordered(const Step& s, std::vector<QueryTile>& tiles) : wanted(s.wanted, s.wanted + s.wanted_rows) {
        std::vector<int32_t> place(s.rows);
        for (QueryTile& tile : tiles) {
            const int32_t begin = tile.first;
            tile.first = int32_t(tokens.size());
            for (int32_t row = begin; row < begin + tile.rows; row++) {
                place[row] = int32_t(tokens.size());
                tokens.push_back(s.tokens[row]);
                positions.push_back(s.positions[row]);
                sequence_of.push_back(tile.sequence);
            }
        }
        for (int32_t& row : wanted) row = place[row];
    }
    void apply(Step& s) const {
        s.tokens = tokens.data();
        s.positions = positions.data();
        s.sequence_of = sequence_of.data();
        s.wanted = wanted.data();
    }
};

const int32_t* ints(const at::Tensor& t, int64_t least, const char* name) {
    TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous() && t.numel() >= least, "program_run: ", name,
                " must be contiguous int32 with at least ", least, " values; got ", t.scalar_type(), " ",
                t.sizes());
    return t.const_data_ptr<int32_t>();
}

// ways: of each Way [threads, n, 45], or [1, n, 45] where no thread has memory of its own; they, matrices and
// layers are the structures of cpu.h as words of 64 bits, linked by serve/link.py, which keeps alive what
// they point to. sizes: Cache, few, tile_tokens, prepared_row.
void program_run(at::TensorList ways, const at::Tensor& matrices, const at::Tensor& layers,
                 const at::Tensor& prepared, at::IntArrayRef sizes, const at::Tensor& tokens,
                 const at::Tensor& positions, const at::Tensor& starts, at::TensorList tables,
                 const at::Tensor& wanted, int64_t rows, int64_t sequences, int64_t wanted_rows,
                 const std::optional<at::Tensor>& times) {
    TORCH_CHECK(rows > 0 && sequences > 0 && sizes.size() == 4, "program_run: an empty step");
    TORCH_CHECK(ways.size() == 3, "program_run: 3 ways; got ", ways.size());
    const int threads = at::get_num_threads();
    const Level& chosen = level();
    const Kernels& k = *chosen.kernels;
    Program p{};
    p.kernels = chosen.kernels;
    bool each = false;  // whether every thread has instructions of its own
    const auto choose = [&](Way way) {
        const at::Tensor& words = ways[int(way)];
        each = way == Way::few;
        TORCH_CHECK(words.dim() == 3 && words.size(2) == 45 && words.size(0) >= (each ? threads : 1),
                    "program_run: instructions must be [", each ? threads : 1, ", n, 45]; got ",
                    words.sizes());
        p.instructions = (const Instruction*)words.const_data_ptr();
        p.count = words.size(1);
    };
    choose(Way::many);
    p.matrices = (const Matrix*)matrices.const_data_ptr();
    p.layers = (const CacheLayer*)layers.const_data_ptr();
    p.cache = Cache(sizes[0]);
    p.few = sizes[1];
    p.bf16 = chosen.bf16;
    p.vnni = chosen.vnni;
    p.brgemm = usable_brgemm();
    p.prepared = prepared.data_ptr();
    p.prepared_row = sizes[3];
    Step s{};
    s.rows = rows;
    s.sequences = sequences;
    s.wanted_rows = wanted_rows;
    s.tokens = ints(tokens, rows, "tokens");
    s.positions = ints(positions, rows, "positions");
    const int32_t* start = ints(starts, sequences + 1, "starts");
    TORCH_CHECK(start[0] == 0 && start[sequences] == rows, "program_run: starts must go from 0 to ", rows,
                " rows; got ", start[0], " to ", start[sequences]);
    s.wanted = ints(wanted, wanted_rows, "wanted");
    std::vector<const int32_t*> table(tables.size());
    std::vector<int64_t> width(tables.size());
    for (size_t g = 0; g < tables.size(); g++) {
        table[g] = ints(tables[g], 0, "tables");
        TORCH_CHECK(tables[g].dim() == 2 && tables[g].size(0) >= sequences,
                    "program_run: tables [S, blocks]");
        width[g] = tables[g].size(1);
    }
    s.tables = table.data();
    s.table_width = width.data();
    s.tile_tokens = rows == sequences ? 1 : sizes[2];
    std::vector<int32_t> sequence_of(rows), newest(sequences, -1);
    std::vector<QueryTile> tiles;
    for (int32_t q = 0; q < sequences; q++) {
        for (int32_t r = start[q]; r < start[q + 1]; r++) {
            sequence_of[r] = q;
            newest[q] = s.positions[r];
            if ((r - start[q]) % s.tile_tokens == 0)
                tiles.push_back({q, r, int32_t(std::min<int64_t>(s.tile_tokens, start[q + 1] - r))});
        }
    }
    const int64_t longest = *std::max_element(newest.begin(), newest.end()) + 1;
    if (s.tile_tokens > 1) tiles = dealt(tiles, threads);
    s.sequence_of = sequence_of.data();
    s.newest = newest.data();
    s.tiles = int64_t(tiles.size());

    std::optional<Reordered> reordered;
    if (rows <= p.few) {
        choose(Way::few);
    } else if (rows >= OWN_ROWS * threads && k.program_own_rows(p, s)) {
        choose(Way::own);
        if (s.tile_tokens > 1) reordered.emplace(s, tiles).apply(s);
    }
    s.query_tiles = tiles.data();

    int64_t scratch = 0, partial = 0;
    const int64_t part_tokens = PART_BLOCKS * BLOCK_TOKENS;
    s.parts = s.tile_tokens > 1 ? 1 : (longest + part_tokens - 1) / part_tokens;
    for (int64_t i = 0; i < p.count; i++) {
        const Instruction& in = p.instructions[i];
        const bool attention = is_attention(in.op);
        scratch = std::max(scratch,
                           attention ? k.program_attention_scratch(p, s, in) : k.program_scratch(p, s, in));
        if (in.op == Op::attend && s.parts > 1)
            partial =
                std::max(partial, s.tiles * s.parts * s.tile_tokens * in.n0 * (p.layers[in.i[0]].dv_pad + 2));
    }
    std::vector<float> parts(partial);
    p.partial = parts.data();
    launches.fetch_add(1, std::memory_order_relaxed);

    // Seconds of each instruction, waiting included, as the first thread sees them.
    double* seconds = times ? times->data_ptr<double>() : nullptr;
    TORCH_CHECK(!seconds || times->numel() >= p.count, "program_run: times for ", p.count, " instructions");
    auto now = [] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };

    auto work = [&](int thread, int team, Barrier* barrier) {
        char* memory = scratch_of_thread(scratch);
        const Instruction* instructions = p.instructions + (each ? thread * p.count : 0);
        for (int64_t i = 0; i < p.count; i++) {
            const Instruction& in = instructions[i];
            const double begin = seconds && thread == 0 ? now() : 0;
            if (barrier && in.meet) barrier->wait();
            const bool attention = is_attention(in.op);
            const int64_t units = attention ? k.program_attention_units(p, s, in) : k.program_units(p, s, in);
            const bool whole = in.share == Share::each;
            const int64_t first = whole ? 0 : units * thread / team;
            const int64_t last = whole ? units : units * (thread + 1) / team;
            if (first < last)
                (attention ? k.program_attention_run : k.program_run)(p, s, in, first, last - first, memory);
            if (seconds && thread == 0) seconds[i] += now() - begin;
        }
        if (p.brgemm) release_brgemm();
    };
    if (threads == 1) return work(0, 1, nullptr);
    std::atomic<Barrier*> shared{nullptr};
    // The size of the team is known inside alone: where the runtime gives fewer threads, fewer meet.
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        shared = new Barrier(omp_get_num_threads());
        work(omp_get_thread_num(), omp_get_num_threads(), shared.load());
    }
    delete shared.load();
}

// Steps of one row a sequence, one after another: each row's next token is that with the largest of its
// logits [S, V]. chosen int64 [count, S]; the number of steps that ran, fewer than `count` where a row of the
// last has a negative number for a token (see sampling/binding.h), or where another thread has made the
// number in interrupt int32 [1] something else than 0.
int64_t program_run_greedy(at::TensorList ways, const at::Tensor& matrices, const at::Tensor& layers,
                           const at::Tensor& prepared, at::IntArrayRef sizes, const at::Tensor& tokens,
                           const at::Tensor& positions, const at::Tensor& starts, at::TensorList tables,
                           const at::Tensor& wanted, const at::Tensor& logits, const at::Tensor& chosen,
                           const at::Tensor& interrupt, const std::optional<at::Tensor>& times) {
    TORCH_CHECK(chosen.dim() == 2 && chosen.scalar_type() == at::kLong && chosen.is_contiguous(),
                "program_run_greedy: chosen must be contiguous int64 [count, S]; got ", chosen.scalar_type(),
                " ", chosen.sizes());
    const int64_t count = chosen.size(0), S = chosen.size(1);
    TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.is_contiguous(),
                "program_run_greedy: logits must be contiguous float32; got ", logits.scalar_type());
    TORCH_CHECK(logits.dim() == 2 && logits.size(0) >= S && tokens.numel() == S && wanted.numel() == S,
                "program_run_greedy: ", S, " sequences with one row each; got ", tokens.numel(),
                " rows, of which ", wanted.numel(), " are wanted, and logits ", logits.sizes());
    const at::Tensor step_tokens = tokens.clone(), step_positions = positions.clone();
    std::vector<int64_t> rows(S);
    std::iota(rows.begin(), rows.end(), 0);
    int64_t* to = chosen.data_ptr<int64_t>();
    const int32_t* stop = ints(interrupt, 1, "interrupt");
    for (int64_t i = 0; i < count; i++, to += S) {
        if (i > 0 && __atomic_load_n(stop, __ATOMIC_RELAXED)) return i;
        program_run(ways, matrices, layers, prepared, sizes, step_tokens, step_positions, starts, tables,
                    wanted, S, S, S, times);
        if (!argmax_rows(logits, rows, to)) return i + 1;
        std::copy(to, to + S, step_tokens.data_ptr<int32_t>());
        step_positions.add_(1);
    }
    return count;
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "program_run(Tensor[] ways, Tensor matrices, Tensor layers, Tensor prepared, int[] sizes, "
        "Tensor tokens, Tensor positions, Tensor starts, Tensor[] tables, Tensor wanted, int rows, "
        "int sequences, int wanted_rows, Tensor(a!)? times=None) -> ()",
        hasten::program_run);
    m.def(
        "program_run_greedy(Tensor[] ways, Tensor matrices, Tensor layers, Tensor prepared, int[] sizes, "
        "Tensor tokens, Tensor positions, Tensor starts, Tensor[] tables, Tensor wanted, Tensor logits, "
        "Tensor(a!) chosen, Tensor interrupt, Tensor(b!)? times=None) -> int",
        hasten::program_run_greedy);
}
