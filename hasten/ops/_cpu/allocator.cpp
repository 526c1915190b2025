// torch's allocator for CPU tensors while something is optimised: large blocks from an arena, the rest from
// the allocator that was there.
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

#include "arena.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace hasten {
namespace {

// Below it the C library's own lists serve a block without the system.
constexpr size_t kLarge = size_t(64) << 10;

void free_any(void* p);

// Blocks outlive the time in which this is torch's allocator: each carries its own deleter, and blocks that
// are freed through "torch's allocator", as oneDNN's are, keep it registered until they are gone. When it
// is switched off it only passes requests on.
class Buffers final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        if (bytes >= kLarge && on_.load(std::memory_order_acquire) &&
            !FLAGS_caffe2_cpu_allocator_do_zero_fill && !FLAGS_caffe2_cpu_allocator_do_junk_fill) {
            void* p;
            {
                std::lock_guard<std::mutex> guard(lock_);
                p = arena_.take(bytes);
                if (!p) arena_.trim(0);  // what follows needs the memory
            }
            if (p) {
                c10::profiledCPUMemoryReporter().New(p, bytes);
                return {p, p, free_any, c10::Device(c10::DeviceType::CPU)};
            }
        }
        return previous()->allocate(bytes);
    }

    c10::DeleterFnPtr raw_deleter() const override { return previous()->raw_deleter() ? free_any : nullptr; }

    void copy_data(void* to, const void* from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }

    void free(void* p) {
        if (!arena_.owns(p)) return previous()->raw_deleter()(p);
        c10::profiledCPUMemoryReporter().Delete(p);
        std::lock_guard<std::mutex> guard(lock_);
        arena_.give(p);
        if (!on_.load(std::memory_order_relaxed)) arena_.trim(0);
    }

    // Empty if on, else why not.
    std::string enable(size_t span, size_t cap, size_t bound, bool huge) {
        std::lock_guard<std::mutex> guard(lock_);
        c10::Allocator* now = c10::GetCPUAllocator();
        if (now != this) {
            if (registered_) return "another CPU allocator was registered with torch since";
            previous_ = now;
            c10::SetCPUAllocator(this, 0);
            if (c10::GetCPUAllocator() != this)
                return "another CPU allocator is registered with torch at a higher priority";
            registered_ = true;
        }
        if (!arena_.is_open() && !arena_.open(span)) {
            leave();
            return "the system gave no range of addresses";
        }
        if (huge) arena_.ask_for_huge_pages();
        arena_.set_cap(cap);
        arena_.set_bound(bound);
        if (!on_.exchange(true)) arena_.start_counting();
        return "";
    }

    void disable() {
        std::lock_guard<std::mutex> guard(lock_);
        on_.store(false);
        if (arena_.is_open()) arena_.trim(0);
        leave();
    }

    ArenaUsage usage() {
        std::lock_guard<std::mutex> guard(lock_);
        if (!on_) leave();
        return arena_.usage();
    }

    void before_fork() { lock_.lock(); }
    void after_fork() { lock_.unlock(); }
    void in_child() {
        on_.store(false);
        lock_.unlock();
    }

  private:
    c10::Allocator* previous() const { return previous_.load(std::memory_order_acquire); }

    void leave() {
        if (!registered_ || arena_.usage().blocks) return;
        registered_ = false;
        if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(previous(), 0);
    }

    std::mutex lock_;
    std::atomic<bool> on_{false};
    bool registered_ = false;
    std::atomic<c10::Allocator*> previous_{nullptr};
    Arena arena_;
};

// Never destroyed: tensors are freed until the very end of the process. A child that is forked has its own
// copy and leaves it alone: its blocks go back to it, new ones come from the previous allocator.
Buffers& buffers() {
    static Buffers& one = *[] {
        auto* made = new Buffers;
        pthread_atfork([] { buffers().before_fork(); }, [] { buffers().after_fork(); },
                       [] { buffers().in_child(); });
        return made;
    }();
    return one;
}

void free_any(void* p) {
    if (p) buffers().free(p);
}

std::string enable(int64_t span, int64_t cap, int64_t bound, bool huge) {
    return buffers().enable(size_t(span), size_t(cap), size_t(bound), huge);
}

void disable() {
    buffers().disable();
}

std::vector<int64_t> usage() {
    const ArenaUsage u = buffers().usage();
    return {u.in_use, u.in_use_peak, u.reserved, u.reserved_peak, u.hits,
            u.misses, u.fresh,       u.released, u.blocks};
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def("buffers_enable(int span, int cap, int bound, bool huge) -> str", hasten::enable);
    m.def("buffers_disable() -> ()", hasten::disable);
    m.def("buffers_usage() -> int[]", hasten::usage);
}
