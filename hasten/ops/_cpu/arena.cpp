#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <vector>

namespace hasten {
namespace {

constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kCommit = size_t(32) << 20;
// A rest below this stays with its block: no request is that small.
constexpr size_t kRest = 4096;
// A period ends when this many times its peak have been handed out: about ten training steps.
constexpr size_t kPeriod = 64;

size_t up(size_t x, size_t unit) {
    return (x + unit - 1) / unit * unit;
}

size_t down(size_t x, size_t unit) {
    return x / unit * unit;
}

size_t resident_bytes(size_t page) {
    size_t pages = 0;
    if (FILE* file = fopen("/proc/self/statm", "r")) {
        if (fscanf(file, "%*s %zu", &pages) != 1) pages = 0;
        fclose(file);
    }
    return pages * page;
}

}  // namespace

bool Arena::open(size_t bytes) {
    page_ = size_t(sysconf(_SC_PAGESIZE));
    for (size_t want = up(bytes, kHuge); want >= kCommit; want = up(want / 2, kHuge)) {
        void* p = mmap(nullptr, want + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) continue;
        begin_ = committed_ = up(uintptr_t(p), kHuge);
        size_ = want;
        // What is left over on both sides, to begin at a boundary of 2 MiB.
        if (begin_ > uintptr_t(p)) munmap(p, begin_ - uintptr_t(p));
        munmap((void*)(begin_ + size_), uintptr_t(p) + kHuge - begin_);
        blocks_.emplace(begin_, Block{size_, State::released});
        return true;
    }
    return false;
}

void Arena::ask_for_huge_pages() {
#ifdef MADV_HUGEPAGE
    if (is_open()) madvise((void*)begin_, size_, MADV_HUGEPAGE);
#endif
}

void* Arena::take(size_t bytes) {
    bytes = up(bytes, kAlign);
    if (bytes > size_) return nullptr;
    auto best = kept_.lower_bound({bytes, 0});
    uintptr_t begin;
    if (best != kept_.end()) {
        begin = best->second;
        hits_++;
    } else {
        const size_t limit = allowed(in_use_ + bytes);
        Window window = cheapest(bytes);
        if (window.fresh == SIZE_MAX) return nullptr;
        const size_t after = in_use_ + kept_bytes_ + window.fresh;
        size_t excess = after > limit ? after - limit : 0;
        if (bound_) {
            const size_t resident = resident_bytes(page_) + window.fresh;
            excess = std::max(excess, resident > bound_ ? resident - bound_ : 0);
        }
        if (!commit(window.begin + bytes)) return nullptr;
        begin = window.begin;
        carve(begin, bytes);
        fresh_ += int64_t(window.fresh);
        misses_++;
        const size_t now = in_use_ + kept_bytes_;
        if (excess) fit(now > excess ? now - excess : 0);
        reserved_peak_ = std::max(reserved_peak_, in_use_ + kept_bytes_);
        return (void*)begin;
    }
    carve(begin, bytes);
    return (void*)begin;
}

void Arena::give(void* p) {
    auto block = blocks_.find(uintptr_t(p));
    count_--;
    set(block, State::kept);
    block = join(block);
    if (kept_bytes_ > cap_) release(block, kept_bytes_ - cap_);
}

void Arena::trim(size_t bytes) {
    fit(in_use_ + bytes);
}

void Arena::start_counting() {
    peak_now_ = in_use_peak_ = in_use_;
    peak_before_ = volume_ = 0;
    reserved_peak_ = in_use_ + kept_bytes_;
    hits_ = misses_ = fresh_ = released_ = 0;
}

ArenaUsage Arena::usage() const {
    return {int64_t(in_use_),
            int64_t(in_use_peak_),
            int64_t(in_use_ + kept_bytes_),
            int64_t(reserved_peak_),
            hits_,
            misses_,
            fresh_,
            released_,
            count_};
}

// What may be reserved while `in_use` bytes are handed out.
size_t Arena::allowed(size_t in_use) const {
    const size_t peak = std::max({peak_now_, peak_before_, in_use});
    return peak + peak / 25 * 2;
}

// The place for `bytes` in neighbouring free blocks with the fewest released bytes, the lowest if several.
Arena::Window Arena::cheapest(size_t bytes) const {
    Window best;
    std::vector<Blocks::const_iterator> run;
    // Released bytes of [begin, begin + bytes), all of it in this run.
    auto consider = [&](uintptr_t begin) {
        if (begin < run.front()->first) return;
        const uintptr_t end = begin + bytes;
        if (end > run.back()->first + run.back()->second.bytes) return;
        size_t fresh = 0;
        for (auto& block : run) {
            const uintptr_t first = std::max(begin, block->first);
            const uintptr_t last = std::min(end, block->first + block->second.bytes);
            if (block->second.state == State::released && first < last)
                fresh += up(last, page_) - down(first, page_);
        }
        if (fresh < best.fresh) best = {begin, fresh};
    };
    for (auto block = blocks_.begin(); block != blocks_.end();) {
        run.clear();
        size_t total = 0;
        for (; block != blocks_.end() && block->second.state != State::used; ++block) {
            run.push_back(block);
            total += block->second.bytes;
        }
        if (total >= bytes)
            for (auto& start : run) {
                consider(start->first);
                consider(start->first + start->second.bytes - bytes);
            }
        if (block != blocks_.end()) ++block;
    }
    return best;
}

// Makes [begin, begin + bytes) one block in use. Pages that it shares with released blocks become kept.
void Arena::carve(uintptr_t begin, size_t bytes) {
    const uintptr_t end = begin + bytes;
    auto block = std::prev(blocks_.upper_bound(begin));
    const auto stop = [](Blocks::iterator it) { return it->first + it->second.bytes; };
    const auto cut = [&](Blocks::iterator it) {
        if (it->second.state == State::released && stop(it) > up(end, page_)) split(it, up(end, page_));
    };
    cut(block);
    if (block->first < begin) {
        if (block->second.state == State::released) {
            if (const uintptr_t first = down(begin, page_); first > block->first) block = split(block, first);
            if (block->first < begin) set(block, State::kept);
        }
        if (block->first < begin) block = split(block, begin);
    }
    set(block, State::used);
    if (block != blocks_.begin() && std::prev(block)->second.state == State::kept) join(std::prev(block));
    while (stop(block) < end) {
        auto next = std::next(block);
        cut(next);
        set(next, State::used);
        block->second.bytes += next->second.bytes;
        blocks_.erase(next);
    }
    if (stop(block) - end >= kRest) {
        auto rest = split(block, end);
        set(rest, State::kept);
        join(rest);
    }
    count_++;
    peak_now_ = std::max(peak_now_, in_use_);
    in_use_peak_ = std::max(in_use_peak_, in_use_);
    volume_ += bytes;
    if (volume_ / kPeriod > peak_now_) {
        peak_before_ = peak_now_;
        peak_now_ = in_use_;
        volume_ = 0;
        fit(allowed(in_use_));
    }
}

void Arena::set(Blocks::iterator block, State state) {
    const size_t bytes = block->second.bytes;
    if (block->second.state == State::kept) {
        kept_.erase({bytes, block->first});
        kept_bytes_ -= bytes;
    } else if (block->second.state == State::used) {
        in_use_ -= bytes;
    }
    block->second.state = state;
    if (state == State::kept) {
        kept_.emplace(bytes, block->first);
        kept_bytes_ += bytes;
    } else if (state == State::used) {
        in_use_ += bytes;
    }
}

// Two blocks of the same state; returns the second.
Arena::Blocks::iterator Arena::split(Blocks::iterator block, uintptr_t at) {
    const size_t first = at - block->first, second = block->second.bytes - first;
    const State state = block->second.state;
    if (state == State::kept) kept_.erase({block->second.bytes, block->first});
    block->second.bytes = first;
    if (state == State::kept) {
        kept_.emplace(first, block->first);
        kept_.emplace(second, at);
    }
    return blocks_.emplace_hint(std::next(block), at, Block{second, state});
}

// Unites a free block with neighbours of the same state.
Arena::Blocks::iterator Arena::join(Blocks::iterator block) {
    const State state = block->second.state;
    auto first = block, end = std::next(block);
    while (first != blocks_.begin() && std::prev(first)->second.state == state) --first;
    while (end != blocks_.end() && end->second.state == state) ++end;
    if (std::next(first) == end) return first;
    const uintptr_t stop = std::prev(end)->first + std::prev(end)->second.bytes;
    if (state == State::kept)
        for (auto it = first; it != end; ++it) kept_.erase({it->second.bytes, it->first});
    blocks_.erase(std::next(first), end);
    first->second.bytes = stop - first->first;
    if (state == State::kept) kept_.emplace(first->second.bytes, first->first);
    return first;
}

bool Arena::commit(uintptr_t end) {
    if (end <= committed_) return true;
    const uintptr_t limit = begin_ + size_;
    const uintptr_t ends[] = {std::min<uintptr_t>(up(end, kCommit), limit), up(end, page_)};
    for (uintptr_t to : ends)
        if (mprotect((void*)committed_, to - committed_, PROT_READ | PROT_WRITE) == 0) {
            committed_ = to;
            return true;
        }
    return false;
}

// Gives the last whole pages of a kept block back, `bytes` or a little more, at most the block.
void Arena::release(Blocks::iterator block, size_t bytes) {
    const uintptr_t stop = block->first + block->second.bytes;
    const uintptr_t last = down(stop, page_), first = up(block->first, page_);
    if (first >= last) return;
    const uintptr_t from = std::max(first, last - std::min(up(bytes, page_), last - first));
    if (madvise((void*)from, last - from, MADV_DONTNEED) != 0) return;
    if (from > block->first) block = split(block, from);
    if (last < stop) split(block, last);
    set(block, State::released);
    released_ += int64_t(last - from);
    join(block);
}

// Releases kept blocks, the largest first, until at most `reserved` bytes are in use or kept.
void Arena::fit(size_t reserved) {
    while (!kept_.empty() && in_use_ + kept_bytes_ > reserved) {
        const size_t before = kept_bytes_;
        release(blocks_.find(std::prev(kept_.end())->second), in_use_ + kept_bytes_ - reserved);
        if (kept_bytes_ == before) return;  // only parts of pages are left
    }
}

}  // namespace hasten
