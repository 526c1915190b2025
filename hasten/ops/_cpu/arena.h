// Memory for large tensors, taken from the system once and reused: best fit inside one range of addresses.
//
// The range is a list of blocks: in use, kept (free, its pages still ours) or released (free, no pages). A
// request goes into the smallest kept block that holds it, its rest is split off, neighbours grow together
// again when they are freed. Only where no kept block is large enough do released bytes join, as few as
// possible, and then other kept blocks go back to the system, so that what is reserved (in use and kept)
// stays within 8 % of the peak in use.
//
// No torch here. Not thread-safe: the caller holds a lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

namespace hasten {

struct ArenaUsage {
    int64_t in_use, in_use_peak;      // bytes handed out
    int64_t reserved, reserved_peak;  // in use and kept
    int64_t hits, misses;     // requests served from kept bytes alone, and those that needed new pages
    int64_t fresh, released;  // bytes taken from the system and given back, all together
    int64_t blocks;           // handed out now
};

class Arena {
  public:
    static constexpr size_t kAlign = 64;

    // Reserves addresses, no memory: `bytes`, or less where the system refuses. False if it refuses all.
    bool open(size_t bytes);
    bool is_open() const { return begin_ != 0; }
    // Pages that are taken from now on may be of 2 MiB.
    void ask_for_huge_pages();

    // At least `bytes` (> 0), aligned to kAlign; null if the system has no memory or the range is full.
    void* take(size_t bytes);
    void give(void* block);
    bool owns(const void* p) const { return uintptr_t(p) - begin_ < size_; }

    // Kept bytes never exceed `bytes`.
    void set_cap(size_t bytes) { cap_ = bytes; }
    // The process's resident bytes do not exceed `bytes` by what is kept; 0: no bound.
    void set_bound(size_t bytes) { bound_ = bytes; }
    // Gives kept blocks back until at most `bytes` are kept.
    void trim(size_t bytes);
    // Forgets peaks and counts.
    void start_counting();

    ArenaUsage usage() const;

  private:
    enum class State { used, kept, released };
    struct Block {
        size_t bytes;
        State state;
    };
    using Blocks = std::map<uintptr_t, Block>;
    struct Window {
        uintptr_t begin = 0;
        size_t fresh = SIZE_MAX;
    };

    Window cheapest(size_t bytes) const;
    void carve(uintptr_t begin, size_t bytes);
    void set(Blocks::iterator block, State state);
    Blocks::iterator split(Blocks::iterator block, uintptr_t at);
    Blocks::iterator join(Blocks::iterator block);
    bool commit(uintptr_t end);
    void release(Blocks::iterator block, size_t bytes);
    void fit(size_t reserved);
    size_t allowed(size_t in_use) const;

    uintptr_t begin_ = 0, committed_ = 0;
    size_t size_ = 0;
    size_t page_ = 4096;
    size_t cap_ = SIZE_MAX, bound_ = 0;
    Blocks blocks_;
    std::set<std::pair<size_t, uintptr_t>> kept_;  // the kept blocks by size
    size_t in_use_ = 0, kept_bytes_ = 0;
    // The peak is that of the last two periods, so that it follows when the work becomes smaller.
    size_t peak_now_ = 0, peak_before_ = 0, volume_ = 0;
    size_t in_use_peak_ = 0, reserved_peak_ = 0;
    int64_t hits_ = 0, misses_ = 0, fresh_ = 0, released_ = 0, count_ = 0;
};

}  // namespace hasten
