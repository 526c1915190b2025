// Loads the library of a level and spreads its work over torch's threads.
#include "binding.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <dlfcn.h>
#include <torch/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hasten {

std::atomic<int64_t> launches{0};

namespace {

Level chosen;

void brgemm_bf16(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                 const void* A, const void* B, float* C) {
    at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, (const at::BFloat16*)A, (const at::BFloat16*)B,
                                C);
}

// XCR0: the register sets that the system saves when it switches threads (Intel SDM, volume 1, 13.1). An
// instruction on a set that it does not save faults, whatever CPUID says of the processor.
int64_t saved_registers() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    constexpr unsigned osxsave = 1u << 27;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave)) return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return int64_t(uint64_t(high) << 32 | low);
#else
    return 0;
#endif
}

// The library stays loaded: its table is in use for the life of the process.
std::string load(std::string path, bool bf16, bool brgemm, int64_t l2_bytes, bool vnni) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "hasten: ", dlerror());
    auto kernels = (const Kernels* (*)())dlsym(library, "hasten_kernels");
    TORCH_CHECK(kernels, "hasten: ", path, " is no library of kernels: ", dlerror());
    chosen = {kernels(), bf16, brgemm ? brgemm_bf16 : nullptr, l2_bytes, vnni};
    return chosen.kernels->level;
}

// The same for any number of threads: pieces of a fixed size, combined in order.
int64_t fingerprint(const at::Tensor& t) {
    TORCH_CHECK(t.is_contiguous(), "fingerprint takes a contiguous tensor");
    constexpr int64_t PIECE = 1 << 18;
    const int64_t bytes = int64_t(t.nbytes()), pieces = (bytes + PIECE - 1) / PIECE;
    std::vector<uint64_t> found(pieces);
    const char* data = (const char*)t.const_data_ptr();
    const auto function = level().kernels->fingerprint;
    at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            found[i] = function(data + i * PIECE, std::min(PIECE, bytes - i * PIECE));
    });
    return int64_t(function(found.data(), pieces * 8));
}

}  // namespace

const Level& level() {
    TORCH_CHECK(chosen.kernels, "hasten: no level is loaded; import hasten.ops.native first");
    return chosen;
}

Brgemm usable_brgemm() {
    if (!chosen.brgemm || !at::globalContext().userEnabledMkldnn()) return nullptr;
    // oneDNN reads its limit once in a process, so one try tells.
    static const bool taken = [] {
        alignas(64) const uint16_t a[32] = {}, b[32 * 16] = {};
        alignas(64) float c[16];
        try {
            chosen.brgemm(1, 16, 32, 32, 16, 16, false, a, b, c);
        } catch (const c10::Error&) {
            return false;
        }
        release_brgemm();
        return true;
    }();
    return taken ? chosen.brgemm : nullptr;
}

void release_brgemm() {
    at::native::cpublas::brgemm_release();
}

}  // namespace hasten

TORCH_LIBRARY(hasten_cpu, m) {
    m.def("load(str path, bool bf16, bool brgemm, int l2_bytes, bool vnni=False) -> str", hasten::load);
    m.def("saved_registers() -> int", hasten::saved_registers);
    m.def("launches() -> int", [] { return hasten::launches.load(); });
    m.def("fingerprint(Tensor t) -> int");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("fingerprint", hasten::fingerprint);
}
