// Runs a program: one parallel region for a step, with a barrier where instructions need one.
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

#include "../_cpu/serving.h"
#include "../panels/cpu.h"
#include "../sampling/serving.h"
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

// A linked program, as serve/link.py lays it out in words of 64 bits: the structures of cpu.h, which it keeps
// alive. Of `few` each thread has instructions of its own.
struct Linked {
    const Instruction* ways[3];  // in the order of Way; of `few` [threads, count]
    int64_t count;
    const Matrix* matrices;
    const CacheLayer* layers;
    void* prepared;
    int64_t prepared_row, cache, few, tile_tokens;
    float* logits;  // [most, vocabulary]
    int64_t vocabulary;
};
static_assert(sizeof(Linked) == 13 * 8);

// A step, in the same way; arrays are int32 but for the last.
struct Given {
    int64_t threads, rows, sequences, wanted_rows;
    const int32_t *tokens, *positions, *starts, *wanted;
    const int32_t* const* tables;  // of each group [sequences, width]
    const int64_t* widths;
    double* times;  // null, or [count]: seconds of each instruction are added
};
static_assert(sizeof(Given) == 11 * 8);

void run_step(const Linked& linked, const Given& given) {
    const int64_t rows = given.rows, sequences = given.sequences;
    const int threads = int(given.threads);
    check(rows > 0 && sequences > 0 && threads > 0, "program_run: an empty step");
    const Level& chosen = level();
    const Kernels& k = *chosen.kernels;
    Program p{};
    p.kernels = chosen.kernels;
    bool each = false;  // whether every thread has instructions of its own
    const auto choose_way = [&](Way way) {
        each = way == Way::few;
        p.instructions = linked.ways[int(way)];
    };
    choose_way(Way::many);
    p.count = linked.count;
    p.matrices = linked.matrices;
    p.layers = linked.layers;
    p.cache = Cache(linked.cache);
    p.few = linked.few;
    p.bf16 = chosen.bf16;
    p.vnni = chosen.vnni;
    p.brgemm = usable_brgemm();
    p.prepared = linked.prepared;
    p.prepared_row = linked.prepared_row;
    Step s{};
    s.rows = rows;
    s.sequences = sequences;
    s.wanted_rows = given.wanted_rows;
    s.tokens = given.tokens;
    s.positions = given.positions;
    const int32_t* start = given.starts;
    check(start[0] == 0 && start[sequences] == rows, "program_run: starts must go from 0 to ", rows,
          " rows; got ", start[0], " to ", start[sequences]);
    s.wanted = given.wanted;
    s.tables = given.tables;
    s.table_width = given.widths;
    s.tile_tokens = rows == sequences ? 1 : linked.tile_tokens;
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
        choose_way(Way::few);
    } else if (rows >= OWN_ROWS * threads && k.program_own_rows(p, s)) {
        choose_way(Way::own);
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

    // Seconds of each instruction, waiting included, as the first thread sees them.
    double* seconds = given.times;
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
    std::atomic<Barrier*> shared{nullptr};
    // The size of the team is known inside alone: where the runtime gives fewer threads, fewer meet.
    together(threads, [&](int thread, int team) {
        if (team > 1) {
#pragma omp single
            shared = new Barrier(team);
        }
        work(thread, team, shared.load());
    });
    delete shared.load();
}

}  // namespace
}  // namespace hasten

using namespace hasten;

HASTEN_DOOR Answer hasten_program_run(const Linked& linked, const Given& given) {
    return guarded([&] { run_step(linked, given); });
}

// Steps of one row a sequence, one after another: each row's next token is that with the largest of its
// logits. chosen [count, S]; `ran`: the number of steps that did, fewer than `count` where a row of the last
// has a negative number for a token (see sampling/serving.h), or where another thread has made `interrupt`
// something else than 0.
HASTEN_DOOR Answer hasten_program_run_greedy(const Linked& linked, const Given& first, int64_t count,
                                             int64_t* chosen, const int32_t* interrupt, int64_t* ran) {
    return guarded([&] {
        const int64_t S = first.sequences;
        check(first.rows == S && first.wanted_rows == S, "program_run_greedy: ", S,
              " sequences with one row each; got ", first.rows, " rows, of which ", first.wanted_rows,
              " are wanted");
        std::vector<int32_t> tokens(first.tokens, first.tokens + S);
        std::vector<int32_t> positions(first.positions, first.positions + S);
        std::vector<int64_t> rows(S);
        std::iota(rows.begin(), rows.end(), 0);
        Given given = first;
        given.tokens = tokens.data(), given.positions = positions.data();
        for (*ran = 0; *ran < count; chosen += S) {
            if (*ran > 0 && __atomic_load_n(interrupt, __ATOMIC_RELAXED)) return;
            run_step(linked, given);
            ++*ran;
            if (!argmax_rows(linked.logits, linked.vocabulary, rows.data(), S, int(first.threads), chosen))
                return;
            std::copy(chosen, chosen + S, tokens.begin());
            for (int32_t& position : positions) position++;
        }
    });
}
