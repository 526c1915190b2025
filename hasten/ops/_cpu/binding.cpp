// What torch lends: its threads, and its product for AMX.
#include "binding.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

namespace hasten {
namespace {

void brgemm_bf16(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                 const void* A, const void* B, float* C) {
    at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, (const at::BFloat16*)A, (const at::BFloat16*)B,
                                C);
}

void release_torch() {
    at::native::cpublas::brgemm_release();
}

// Null where torch would refuse it now: oneDNN is switched off, or limited to a level below
// (ONEDNN_MAX_CPU_ISA). The pairs of bf16 then do the work.
Brgemm torch_brgemm() {
    if (!at::globalContext().userEnabledMkldnn()) return nullptr;
    // oneDNN reads its limit once in a process, so one try tells.
    static const bool taken = [] {
        alignas(64) const uint16_t a[32] = {}, b[32 * 16] = {};
        alignas(64) float c[16];
        try {
            brgemm_bf16(1, 16, 32, 32, 16, 16, false, a, b, c);
        } catch (const c10::Error&) {
            return false;
        }
        release_torch();
        return true;
    }();
    return taken ? brgemm_bf16 : nullptr;
}

void load(const std::string& path, bool bf16, bool amx, int64_t l2_bytes, bool vnni) {
    choose(path.c_str(),
           {nullptr, bf16, l2_bytes, vnni, amx ? torch_brgemm : nullptr, amx ? release_torch : nullptr});
}

// Addresses of what a level with AMX needs of torch, for serving.so.
std::vector<int64_t> brgemm() {
    return {int64_t(torch_brgemm), int64_t(release_torch)};
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
}  // namespace hasten

TORCH_LIBRARY(hasten_cpu, m) {
    m.def("load(str path, bool bf16, bool amx, int l2_bytes, bool vnni=False) -> ()", hasten::load);
    m.def("brgemm() -> int[]", hasten::brgemm);
    m.def("launches() -> int", [] { return hasten::launches.load(); });
    m.def("fingerprint(Tensor t) -> int");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("fingerprint", hasten::fingerprint);
}
